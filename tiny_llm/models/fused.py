"""Norm, activation and embedding with their backward passes by hand: on a CPU every pass over memory counts.

M rows  D width  F outputs of the gate  V vocabulary

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
        normed_MD: Tensor = (rows_MD * inverse_M1).mul_(weight.unsqueeze(-2))
        return normed_MD.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_M1 = ctx.saved_tensors
        normed_MD = _rows(x, weight) * inverse_M1
        upstream_MD = _rows(upstream, weight).to(normed_MD.dtype)
        product_MD = upstream_MD * normed_MD
        along_M1 = product_MD @ weight.to(normed_MD.dtype).unsqueeze(-1).div(-x.shape[-1])
        gradient_MD = (upstream_MD * weight.unsqueeze(-2)).addcmul_(normed_MD, along_M1).mul_(inverse_M1)
        return gradient_MD.to(x.dtype).view(x.shape), product_MD.sum(-2), None


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return [M, D], or [N, M, D] where every worker has a weight of its own."""
    return x.flatten(0, -2) if weight.dim() == 1 else x.flatten(1, -2)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up for gate and up side by side in the last axis, 2 F wide."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
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
