"""Norm, activation, linear and embedding with backward passes by hand: on a CPU every pass over memory counts.

M rows  D width  O outputs  F outputs of the gate  V vocabulary

`operations.py` takes these where it runs eagerly on a CPU; compiled code and GPUs fuse the plain formulas
themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * scale for x [(N,) ..., D] and scale [D] or [N, D], reduced in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        rows_MD = _rows(x, weight).to(wide)
        mean_square = torch.linalg.vector_norm(rows_MD, dim=-1, keepdim=True).square_() / x.shape[-1]
        inverse_M1 = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_M1)
        own = rows_MD if rows_MD.dtype != x.dtype else torch.empty_like(rows_MD)
        normed_MD = torch.mul(rows_MD, inverse_M1, out=own).mul_(weight.unsqueeze(-2))
        return normed_MD.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_M1 = ctx.saved_tensors
        parts = _rows(upstream, weight), _rows(x, weight), weight, inverse_M1
        if weight.dim() == 1:
            of_x, of_weight = _rms_norm_backward(*parts)
        else:
            each = [_rms_norm_backward(*part) for part in zip(*parts, strict=True)]
            of_x, of_weight = (torch.stack(gradients) for gradients in zip(*each, strict=True))
        return of_x.view(x.shape), of_weight, None


def _rms_norm_backward(
    upstream_MD: Tensor, x_MD: Tensor, weight_D: Tensor, inverse_M1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, in one pass of torch's for a LayerNorm of mean 0 and these deviations.

    From x it takes the mean of upstream * weight as well, along each row, which no mean was taken for: back with it.
    The weight's it would add up in the dtype of x, which is too narrow for more than a few rows of bf16.
    """
    wide = torch.promote_types(x_MD.dtype, torch.float32)
    weight_D, inverse_M1 = weight_D.to(wide), inverse_M1.to(wide)
    mean_M1, narrow = torch.zeros_like(inverse_M1), x_MD.dtype != wide
    of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
        upstream_MD, x_MD, weight_D.shape, mean_M1, inverse_M1, weight_D, None, [True, not narrow, False]
    )
    if narrow:
        of_weight = (inverse_M1.mT @ upstream_MD.to(wide).mul_(x_MD)).squeeze(0)
    means_M = upstream_MD @ (weight_D / len(weight_D)).to(x_MD.dtype)
    return of_x.add_((means_M.unsqueeze(-1) * inverse_M1).to(of_x.dtype)), of_weight


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return [M, D], or [N, M, D] where every worker has a weight of its own."""
    return x.flatten(0, -2) if weight.dim() == 1 else x.flatten(1, -2)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up for gate and up side by side in the last axis, 2 F wide."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        if not ctx.needs_input_grad[0]:
            return activated.mul_(up)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        of_gate, of_up = gradient.chunk(2, dim=-1)
        torch.mul(upstream, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(upstream * up, gate, grad_input=of_gate)
        return gradient


class Linear(torch.autograd.Function):
    """x W^T + b of one model, whose W's gradient goes straight to where gradients add up: autograd gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None, total_OD: Tensor) -> Tensor:
        weight_OD = weight_OD.to(x.dtype)
        ctx.save_for_backward(x, weight_OD)
        ctx.total_OD = total_OD
        return torch.nn.functional.linear(x, weight_OD, None if bias_O is None else bias_O.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OD = ctx.saved_tensors
        upstream_MO, x_MD = upstream.flatten(0, -2), x.flatten(0, -2)
        if ctx.total_OD.dtype == x.dtype:
            ctx.total_OD.addmm_(upstream_MO.mT, x_MD)
        else:
            ctx.total_OD += upstream_MO.mT @ x_MD
        of_bias = upstream_MO.sum(0) if ctx.needs_input_grad[2] else None
        return (upstream_MO @ weight_OD).view(x.shape), None, of_bias, None


class Embedding(torch.autograd.Function):
    """Rows of a weight [V, D], whose gradient goes straight to where gradients add up: autograd gets none."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VD: Tensor, total_VD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.tokens, ctx.total_VD = tokens, total_VD
        return torch.nn.functional.embedding(tokens, weight_VD).to(dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, ...]:
        ctx.total_VD.index_add_(0, ctx.tokens.flatten(), upstream.flatten(0, -2).to(ctx.total_VD.dtype))
        return None, None, None, None
