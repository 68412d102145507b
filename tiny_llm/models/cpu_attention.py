"""Causal attention for CPUs, where torch's fused kernel takes twice as long as the matmuls in it.

P pairs of sequence and head  R rows of a block  T positions  S positions up to a block's end  K head dimension

Rows go through in blocks and each block sees only the columns before its end, so half of the square is never
computed. The backward pass finds the softmax weights of short sequences as the forward pass left them and makes
those of long ones again, so memory stays linear in T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny_llm.config.memory import ATTENTION_ROWS, KEPT_WEIGHTS_LENGTH

ROWS = ATTENTION_ROWS


def causal_attention(q_PTK: Tensor, k_PTK: Tensor, v_PTK: Tensor) -> Tensor:
    """Return softmax(q k^T) v over the positions up to each one's own: [P, T, K]; q comes scaled."""
    mixed_PTK: Tensor = _CausalAttention.apply(q_PTK, k_PTK, v_PTK)  # type: ignore[no-untyped-call]
    return mixed_PTK


def _weights(q_PTK: Tensor, k_PTK: Tensor, start: int) -> Tensor:
    """Return the softmax weights [P, R, S] of the block of rows that begins at `start`."""
    stop = min(start + ROWS, q_PTK.shape[1])
    scores_PRS = torch.bmm(q_PTK[:, start:stop], _transposed(k_PTK[:, :stop]))
    future_RR = q_PTK.new_full((stop - start, stop - start), -torch.inf).triu_(1)
    scores_PRS[..., start:] += future_RR
    return torch.softmax(scores_PRS, dim=-1, out=scores_PRS)


def _transposed(part_PSK: Tensor) -> Tensor:
    """Return [P, K, S] as the matmul likes it: from rows, a dense matrix is transposed at no cost."""
    return part_PSK.contiguous().mT


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_PTK: Tensor, k_PTK: Tensor, v_PTK: Tensor) -> Tensor:
        mixed_PTK, kept = torch.empty_like(q_PTK), []
        for start in range(0, q_PTK.shape[1], ROWS):
            weights_PRS = _weights(q_PTK, k_PTK, start)
            stop = weights_PRS.shape[-1]
            mixed_PTK[:, start:stop] = torch.bmm(weights_PRS, v_PTK[:, :stop])
            if any(ctx.needs_input_grad) and q_PTK.shape[1] <= KEPT_WEIGHTS_LENGTH:
                kept.append(weights_PRS)
        ctx.save_for_backward(q_PTK, k_PTK, v_PTK, *kept)
        return mixed_PTK

    @staticmethod
    def backward(ctx: Any, upstream_PTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Go from the last block to the first: the last one's share of k and v begins their sums."""
        q_PTK, k_PTK, v_PTK, *kept = ctx.saved_tensors
        wide = torch.promote_types(q_PTK.dtype, torch.float32)
        q_gradient = torch.empty_like(q_PTK)
        sums: list[Tensor] = []  # of the gradients of k and v
        for start in reversed(range(0, q_PTK.shape[1], ROWS)):
            weights_PRS = kept[start // ROWS] if kept else _weights(q_PTK, k_PTK, start)
            stop = weights_PRS.shape[-1]
            upstream_PRK = upstream_PTK[:, start:stop].contiguous()
            weights_gradient = torch.bmm(upstream_PRK, _transposed(v_PTK[:, :stop]))
            scores_PRS = torch._softmax_backward_data(weights_gradient, weights_PRS, -1, q_PTK.dtype)
            q_gradient[:, start:stop] = torch.bmm(scores_PRS, k_PTK[:, :stop])
            shares = torch.bmm(scores_PRS.mT, q_PTK[:, start:stop]), torch.bmm(weights_PRS.mT, upstream_PRK)
            if sums:
                for total, share in zip(sums, shares, strict=True):
                    total[:, :stop] += share
            else:
                sums = [share.to(wide) for share in shares]
        return q_gradient, sums[0].to(k_PTK.dtype), sums[1].to(v_PTK.dtype)
