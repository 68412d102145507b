"""One gossip step over an arena, in place: x <- W'x with W' = gamma W + (1 - gamma) I."""

from __future__ import annotations

import torch
from torch import Tensor

Peers = list[list[tuple[int, float]]]

BLOCK = 2**17  # columns mixed at once on a CPU: N blocks and their results stay in its caches


def mix_(arena_ND: Tensor, peers: Peers, gamma: float = 1.0) -> None:
    """Mix the rows of an arena [N, D] by the sparse rows of W, without a second arena.

    peers: for each worker i the pairs (j, W_ij), i itself among them, in ascending j. Each row adds its terms
    in that order, so a worker's result does not depend on how many others there are.
    """
    if len(arena_ND) == 1 or gamma == 0.0:
        return
    rows = [_weakened(row, i, gamma) for i, row in enumerate(peers)]
    columns = arena_ND.shape[1]
    block = BLOCK if arena_ND.device.type == "cpu" else columns
    mixed_NC = torch.empty(len(arena_ND), min(block, columns), dtype=arena_ND.dtype, device=arena_ND.device)
    for start in range(0, columns, block):
        part_NC = arena_ND[:, start : start + block]
        result_NC = mixed_NC[:, : part_NC.shape[1]]
        for i, row in enumerate(rows):
            (first, weight), *others = row
            torch.mul(part_NC[first], weight, out=result_NC[i])
            for j, weight in others:
                result_NC[i].add_(part_NC[j], alpha=weight)
        part_NC.copy_(result_NC)


def _weakened(row: list[tuple[int, float]], i: int, gamma: float) -> list[tuple[int, float]]:
    """Return row i of gamma W + (1 - gamma) I."""
    return [(j, gamma * weight + (1 - gamma) * (j == i)) for j, weight in row]


def consensus_error(arena_ND: Tensor) -> tuple[float, float]:
    """Return the mean over workers of ||x_i - mean||^2, and the same relative to ||mean||^2."""
    apart = torch.zeros((), dtype=torch.float64)
    length = torch.zeros((), dtype=torch.float64)
    for part_NC in torch.split(arena_ND, BLOCK * 8, dim=1):
        mean_C = part_NC.mean(0)
        apart += (part_NC - mean_C).square().sum(dtype=torch.float64).cpu()
        length += mean_C.square().sum(dtype=torch.float64).cpu()
    error = float(apart) / len(arena_ND)
    return error, error / max(float(length), 1e-300)
