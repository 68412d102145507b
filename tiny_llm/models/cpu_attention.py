"""Causal attention for CPUs, where torch's fused kernel takes twice as long as the matmuls in it.

M sequences of all workers  T positions  H query heads  G key/value heads  K head dimension
P pairs of sequence and head  R rows of a block  S positions up to a block's end

Rows go through in blocks and each block sees only the columns before its end, so half of the square is never
computed. The backward pass finds the softmax weights of short sequences as the forward pass left them and makes
those of long ones again, so memory stays linear in T.

Queries, keys and values come with the heads side by side; the matmuls want a dense matrix for every head. The
rotation writes them there, and back again: by hand, or as part of what the compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny_llm.config.memory import ATTENTION_ROWS, KEPT_WEIGHTS_LENGTH
from tiny_llm.models.operations import rotate

ROWS = ATTENTION_ROWS


def causal_attention(q_MTHK: Tensor, k_MTGK: Tensor, v_MTGK: Tensor, table: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v over the positions up to each one's own: [M, T, H, K].

    table: cosines and sines [2, T, K/2] that q and k are turned by first (`operations.rotate`); None to leave them.
    """
    attention = _compiled if torch.compiler.is_compiling() else _CausalAttention.apply
    mixed_MTHK: Tensor = attention(q_MTHK, k_MTGK, v_MTGK, table)
    return mixed_MTHK


def _turn(source: Tensor, target: Tensor, table: Tensor | None) -> None:
    """Write `source` [..., T, K], turned as by `operations.rotate`, into `target`, whatever their strides."""
    if table is None:
        target.copy_(source)
        return
    cos, sin = table
    (first, second), (left, right) = source.chunk(2, dim=-1), target.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)


def _turned_back(table: Tensor | None) -> Tensor | None:
    """Return the table of the opposite angles: the gradient of a rotation turns back."""
    return None if table is None else table * table.new_tensor([1, -1]).view(2, 1, 1)


def _pairs(part_MTGK: Tensor, heads: int, table: Tensor | None = None) -> Tensor:
    """Return one part, turned, a dense matrix for every pair of sequence and query head: [P, T, K]."""
    sequences, length, groups, width = part_MTGK.shape
    own_MGTK = part_MTGK.new_empty(sequences, groups, length, width)
    _turn(part_MTGK.transpose(1, 2), own_MGTK, table)
    if groups < heads:
        own_MGTK = own_MGTK.repeat_interleave(heads // groups, dim=1)
    return own_MGTK.view(-1, length, width)


def _weights(q_PTK: Tensor, k_PTK: Tensor, start: int) -> Tensor:
    """Return the softmax weights [P, R, S] of the block of rows that begins at `start`; q comes scaled."""
    stop = min(start + ROWS, q_PTK.shape[1])
    scores_PRS = torch.bmm(q_PTK[:, start:stop], _transposed(k_PTK[:, :stop]))
    future_RR = q_PTK.new_full((stop - start, stop - start), -torch.inf).triu_(1)
    scores_PRS[..., start:] += future_RR
    return torch.softmax(scores_PRS, dim=-1, out=scores_PRS)


def _transposed(part_PSK: Tensor) -> Tensor:
    """Return [P, K, S] as the matmul likes it: from rows, a dense matrix is transposed at no cost."""
    return part_PSK.contiguous().mT


def _forward(q_PTK: Tensor, k_PTK: Tensor, v_PTK: Tensor, mixed_MHTK: Tensor, keep: bool) -> list[Tensor]:
    """Write the mixtures into `mixed_MHTK`; return the blocks' weights where the backward pass is to find them."""
    kept = []
    for start in range(0, q_PTK.shape[1], ROWS):
        weights_PRS = _weights(q_PTK, k_PTK, start)
        stop = weights_PRS.shape[-1]
        mixed_PRK = torch.bmm(weights_PRS, v_PTK[:, :stop])
        mixed_MHTK[:, :, start:stop] = mixed_PRK.view(*mixed_MHTK.shape[:2], *mixed_PRK.shape[1:])
        if keep and q_PTK.shape[1] <= KEPT_WEIGHTS_LENGTH:
            kept.append(weights_PRS)
    return kept


def _backward(
    upstream_MHTK: Tensor, q_PTK: Tensor, k_PTK: Tensor, v_PTK: Tensor, kept: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of q, k and v, last block first: its share of those of k and v begins their sums."""
    wide = torch.promote_types(q_PTK.dtype, torch.float32)
    q_gradient = torch.empty_like(q_PTK)
    sums: list[Tensor] = []  # of the gradients of k and v
    for start in reversed(range(0, q_PTK.shape[1], ROWS)):
        weights_PRS = kept[start // ROWS] if kept else _weights(q_PTK, k_PTK, start)
        stop = weights_PRS.shape[-1]
        upstream_PRK = upstream_MHTK[:, :, start:stop].flatten(0, 1)
        weights_gradient = torch.bmm(upstream_PRK, _transposed(v_PTK[:, :stop]))
        scores_PRS = torch._softmax_backward_data(weights_gradient, weights_PRS, -1, q_PTK.dtype)
        q_gradient[:, start:stop] = torch.bmm(scores_PRS, k_PTK[:, :stop])
        shares = torch.bmm(scores_PRS.mT, q_PTK[:, start:stop]), torch.bmm(weights_PRS.mT, upstream_PRK)
        if sums:
            for total, share in zip(sums, shares, strict=True):
                total[:, :stop] += share
        else:
            sums = [share.to(wide) for share in shares]
    return [q_gradient, *(total.to(q_PTK.dtype) for total in sums)]


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_MTHK: Tensor, k_MTGK: Tensor, v_MTGK: Tensor, table: Tensor | None) -> Tensor:
        heads, width = q_MTHK.shape[2:]
        q_PTK = _pairs(q_MTHK, heads, table).mul_(width**-0.5)
        k_PTK, v_PTK = _pairs(k_MTGK, heads, table), _pairs(v_MTGK, heads)
        mixed_MTHK = q_MTHK.new_empty(q_MTHK.shape)
        kept = _forward(q_PTK, k_PTK, v_PTK, mixed_MTHK.transpose(1, 2), any(ctx.needs_input_grad))
        ctx.save_for_backward(q_PTK, k_PTK, v_PTK, table, *kept)
        ctx.groups = k_MTGK.shape[2]
        return mixed_MTHK

    @staticmethod
    def backward(ctx: Any, upstream_MTHK: Tensor) -> tuple[Tensor | None, ...]:
        q_PTK, k_PTK, v_PTK, table, *kept = ctx.saved_tensors
        heads, width = upstream_MTHK.shape[2:]
        of_q, of_k, of_v = _backward(upstream_MTHK.transpose(1, 2), q_PTK, k_PTK, v_PTK, kept)
        back = _turned_back(table)
        return (
            _from_pairs(of_q.mul_(width**-0.5), heads, heads, back),
            _from_pairs(of_k, heads, ctx.groups, back),
            _from_pairs(of_v, heads, ctx.groups),
            None,
        )


def _from_pairs(part_PTK: Tensor, heads: int, groups: int, table: Tensor | None = None) -> Tensor:
    """Return the gradient [M, T, G, K] of what `_pairs` was given from that of what it gave."""
    length, width = part_PTK.shape[1:]
    part_MGHTK = part_PTK.view(-1, groups, heads // groups, length, width)
    part_MGTK = part_MGHTK.sum(2) if groups < heads else part_MGHTK[:, :, 0]
    own_MTGK = part_PTK.new_empty(len(part_MGTK), length, groups, width)
    _turn(part_MGTK, own_MTGK.transpose(1, 2), table)
    return own_MTGK


def _compiled(q_MTHK: Tensor, k_MTGK: Tensor, v_MTGK: Tensor, table: Tensor | None) -> Tensor:
    """Do the same around `_operator`, with formulas for the compiler to fuse with what stands before and after."""
    heads, width = q_MTHK.shape[2:]
    if table is not None:
        q_MTHK, k_MTGK = rotate(q_MTHK, table), rotate(k_MTGK, table)
    q_MHTK, k_MHTK, v_MHTK = (
        part.repeat_interleave(heads // part.shape[2], dim=2).transpose(1, 2).contiguous()
        for part in (q_MTHK * width**-0.5, k_MTGK, v_MTGK)
    )
    mixed_MHTK: Tensor = _operator(q_MHTK, k_MHTK, v_MHTK, torch.is_grad_enabled())[0]
    return mixed_MHTK.transpose(1, 2)


@torch.library.custom_op("tiny_llm::causal_attention", mutates_args=())
def _operator(q_MHTK: Tensor, k_MHTK: Tensor, v_MHTK: Tensor, keep: bool) -> list[Tensor]:
    """Return the mixtures [M, H, T, K], then the blocks' weights; q comes scaled. The compiler never looks inside."""
    mixed_MHTK = torch.empty_like(q_MHTK)
    q_PTK, k_PTK, v_PTK = (part.flatten(0, 1) for part in (q_MHTK, k_MHTK, v_MHTK))
    return [mixed_MHTK, *_forward(q_PTK, k_PTK, v_PTK, mixed_MHTK, keep)]


@_operator.register_fake
def _shapes(q_MHTK: Tensor, k_MHTK: Tensor, v_MHTK: Tensor, keep: bool) -> list[Tensor]:
    sequences, heads, length, _ = q_MHTK.shape
    starts = range(0, length, ROWS) if keep and length <= KEPT_WEIGHTS_LENGTH else ()
    stops = [min(start + ROWS, length) for start in starts]
    kept = [q_MHTK.new_empty(sequences * heads, (stop - 1) % ROWS + 1, stop) for stop in stops]
    return [torch.empty_like(q_MHTK), *kept]


@torch.library.custom_op("tiny_llm::causal_attention_backward", mutates_args=())
def _backward_operator(
    upstream_MHTK: Tensor, q_MHTK: Tensor, k_MHTK: Tensor, v_MHTK: Tensor, kept: list[Tensor]
) -> list[Tensor]:
    q_PTK, k_PTK, v_PTK = (part.flatten(0, 1) for part in (q_MHTK, k_MHTK, v_MHTK))
    return [part.view(q_MHTK.shape) for part in _backward(upstream_MHTK, q_PTK, k_PTK, v_PTK, kept)]


@_backward_operator.register_fake
def _backward_shapes(
    upstream_MHTK: Tensor, q_MHTK: Tensor, k_MHTK: Tensor, v_MHTK: Tensor, kept: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(part) for part in (q_MHTK, k_MHTK, v_MHTK)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _differentiate(ctx: Any, upstreams: list[Tensor]) -> tuple[Tensor | None, ...]:
    q_MHTK, k_MHTK, v_MHTK, *kept = ctx.saved_tensors
    return *_backward_operator(upstreams[0], q_MHTK, k_MHTK, v_MHTK, kept), None


_operator.register_autograd(_differentiate, setup_context=_save)
