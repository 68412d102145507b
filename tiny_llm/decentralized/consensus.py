"""Consensus error: how far the workers' parameters are apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PART = 2**20  # columns at once


def consensus_error(
    rows_nD: Tensor, num_models: int | None = None, sum_: Callable[[Tensor], None] = lambda _: None
) -> tuple[float, float]:
    """Return the mean over workers of ||x_i - mean||^2, and the same relative to ||mean||^2.

    num_models: the workers in all, where the rows [n, D] are some of them and sum_ adds a tensor up, in place, over
    the processes that hold the others.
    """
    number = num_models or len(rows_nD)
    apart = torch.zeros(1, dtype=torch.float64, device=rows_nD.device)
    length = torch.zeros_like(apart)
    for part_nC in torch.split(rows_nD, PART, dim=1):
        mean_C = part_nC.sum(0, dtype=torch.float64)
        sum_(mean_C)
        mean_C /= number
        apart += (part_nC - mean_C).square().sum()
        length += mean_C.square().sum()
    sum_(apart)
    error = float(apart) / number
    return error, error / max(float(length), 1e-300)
