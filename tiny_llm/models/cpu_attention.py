"""Causal attention for CPUs, where torch's fused kernel takes twice as long as the matmuls in it.

P pairs of sequence and head  R rows of a block  T positions  S positions up to a block's end  K head dimension

Rows go through in blocks and each block sees only the columns before its end, so half of the square is never
computed. Softmax weights live for one block; the backward pass makes them again, so memory stays linear in T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 128  # of a block


def causal_attention(q_PTK: Tensor, k_PTK: Tensor, v_PTK: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v over the positions up to each one's own: [P, T, K]."""
    mixed: Tensor = _CausalAttention.apply(q_PTK * q_PTK.shape[-1] ** -0.5, k_PTK, v_PTK)  # type: ignore[no-untyped-call]
    return mixed


def _weights(q_PTK: Tensor, k_PTK: Tensor, start: int) -> Tensor:
    """Return the softmax weights [P, R, S] of the block of rows that begins at `start`."""
    stop = min(start + ROWS, q_PTK.shape[1])
    scores_PRS = torch.bmm(q_PTK[:, start:stop], k_PTK[:, :stop].mT)
    rows = stop - start
    future_RR = torch.ones(rows, rows, dtype=torch.bool, device=q_PTK.device).triu_(1)
    scores_PRS[..., start:].masked_fill_(future_RR, -torch.inf)
    return torch.softmax(scores_PRS, dim=-1)


class _CausalAttention(torch.autograd.Function):
    """q comes scaled."""

    @staticmethod
    def forward(ctx: Any, q_PTK: Tensor, k_PTK: Tensor, v_PTK: Tensor) -> Tensor:
        ctx.save_for_backward(q_PTK, k_PTK, v_PTK)
        mixed_PTK = torch.empty_like(q_PTK)
        for start in range(0, q_PTK.shape[1], ROWS):
            weights_PRS = _weights(q_PTK, k_PTK, start)
            stop = weights_PRS.shape[-1]
            mixed_PTK[:, start:stop] = torch.bmm(weights_PRS, v_PTK[:, :stop])
        return mixed_PTK

    @staticmethod
    def backward(ctx: Any, upstream_PTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_PTK, k_PTK, v_PTK = ctx.saved_tensors
        upstream_PTK = upstream_PTK.contiguous()
        wide = torch.promote_types(q_PTK.dtype, torch.float32)
        q_gradient = torch.empty_like(q_PTK)
        k_gradient, v_gradient = (torch.zeros_like(part, dtype=wide) for part in (k_PTK, v_PTK))
        for start in range(0, q_PTK.shape[1], ROWS):
            weights_PRS = _weights(q_PTK, k_PTK, start)
            stop = weights_PRS.shape[-1]
            block, before = slice(start, stop), slice(None, stop)
            v_gradient[:, before] += torch.bmm(weights_PRS.mT, upstream_PTK[:, block])
            weights_gradient = torch.bmm(upstream_PTK[:, block], v_PTK[:, before].mT)
            scores_PRS = torch._softmax_backward_data(weights_gradient, weights_PRS, -1, q_PTK.dtype)
            q_gradient[:, block] = torch.bmm(scores_PRS, k_PTK[:, before])
            k_gradient[:, before] += torch.bmm(scores_PRS.mT, q_PTK[:, block])
        return q_gradient, k_gradient.to(k_PTK.dtype), v_gradient.to(v_PTK.dtype)
