"""The few operations of a decoder, each for one model and for N packed models.

N workers  B sequences  T positions  D width  O outputs  H heads  K head dimension  V vocabulary  M targets

One model has weight [O, D] and activations [B, T, D]; packed models have [N, O, D] and [N, B, T, D]. Nothing
above this file asks which. Weights are fp32 (or fp64) masters, cast to the activations' dtype where they are
used; norms and losses reduce in fp32 at least.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from tiny_llm.config.memory import LOGIT_BLOCK_BYTES
from tiny_llm.models import fused

IGNORED = -100  # a target that does not count
STRIP_BYTES = 2**21  # of logits in fp32 that the cores' caches hold
FEW_ROWS = 16  # of activations at most, where reading the weight is what a matmul costs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: [(N,) B, T, D], [(N,) O, D] and [(N,) O] give [(N,) B, T, O]."""
    weight = weight.to(x.dtype)
    if bias is not None:
        bias = bias.to(x.dtype)
    if weight.dim() == 2:
        by_pieces = _few_rows(x) and not _on_intel()
        return (_linear_of_few_rows if by_pieces else functional.linear)(x, weight, bias)
    flat = x.flatten(1, -2)
    product = torch.bmm(flat, weight.mT) if bias is None else torch.baddbmm(bias[:, None], flat, weight.mT)
    return product.view(*x.shape[:-1], weight.shape[-2])


def _few_rows(x: Tensor) -> bool:
    """Whether these are the few positions of sampling on a CPU, which nothing learns from."""
    return (
        0 < x.numel() <= FEW_ROWS * x.shape[-1]
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
    )


@functools.cache
def _on_intel() -> bool:
    """Whether these are Intel's own cores: on others MKL reads the weight at half the memory's speed for few rows."""
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.11
        return False
    return "Intel" in str(torch.cpu.get_capabilities().get("cpu_name"))


def _linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b as W x^T, a piece of W for every thread."""
    outputs, width = weight.shape
    pieces = min(torch.get_num_threads(), outputs)
    even = outputs - outputs % pieces
    x_PDM = x.reshape(1, -1, width).mT.expand(pieces, -1, -1)
    body_OD = weight if even == outputs else weight[:even]
    product = torch.bmm(body_OD.view(pieces, -1, width), x_PDM).view(even, -1)
    if even < outputs:
        product = torch.cat([product, weight[even:] @ x_PDM[0]])
    if product.shape[1] > 1:
        product = product.t().contiguous()
    product = product.view(*x.shape[:-1], outputs)
    return product if bias is None else product + bias


def fuses(x: Tensor) -> bool:
    """Whether this is for `fused.py`: what runs eagerly on a CPU."""
    return x.is_cpu and not torch.compiler.is_compiling()


def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return the rows of weight [(N,) V, D] that tokens [(N,) B, T] name, in `dtype`.

    total: of one model, where the weight's gradient is added; autograd gets none then.
    """
    if total is not None:
        rows: Tensor = fused.Embedding.apply(tokens, weight, total, dtype)  # type: ignore[no-untyped-call]
        return rows
    if weight.dim() == 2:
        return functional.embedding(tokens, weight).to(dtype)
    worker = torch.arange(len(weight), device=tokens.device).view(-1, 1, 1)
    return weight[worker, tokens].to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight (Zhang & Sennrich 2019, eq. 4) with weight [(N,) D]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if (
        x.dtype == weight.dtype == wide and weight.dim() == 1 and _few_rows(x)
    ):  # where starting steps is what costs
        if x.numel() > x.shape[-1]:
            return functional.rms_norm(x, weight.shape, weight, eps)
        row = x.flatten()
        return x * weight / math.sqrt(row.dot(row).item() / len(row) + eps)
    if fuses(x):
        normed: Tensor = fused.RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return normed
    scale = weight if weight.dim() == 1 else weight.view(len(weight), 1, 1, -1)
    return (functional.rms_norm(x.to(wide), x.shape[-1:], None, eps) * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / std * weight + bias (Ba et al. 2016, eq. 4) with weight and bias [(N,) D]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if weight.dim() == 1:
        return functional.layer_norm(x.to(wide), weight.shape, weight, bias, eps).to(x.dtype)
    scale, shift = (part.view(len(part), 1, 1, -1) for part in (weight, bias))
    normed = functional.layer_norm(x.to(wide), x.shape[-1:], None, None, eps)
    return torch.addcmul(shift, normed, scale).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of x Phi(x) (Hendrycks & Gimpel 2016, section 2)."""
    return functional.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020, eq. 6) for gate and up side by side in the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    if not torch.is_grad_enabled():
        return functional.silu(gate).mul_(up)
    if fuses(gate_up):
        activated: Tensor = fused.SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
        return activated
    return functional.silu(gate) * up


def rotary_table(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return cosines and sines [2, T, K/2] of position * theta^(-2i/K) (Su et al. 2021, eq. 15).

    Compiled code makes its own table: a cached tensor would be an input that its graph cannot fold.
    """
    make = _make_rotary_table if torch.compiler.is_compiling() else _cached_rotary_table
    return make(length, head_dim, theta, device, dtype)


def _make_rotary_table(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float64), theta**-exponent)
    return torch.stack([angle.cos(), angle.sin()]).to(dtype)


@functools.lru_cache(maxsize=8)
def _cached_rotary_table(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    with torch.inference_mode(False):  # a table first made while sampling must serve training too
        return _make_rotary_table(length, head_dim, theta, device, dtype)


def rotate(x_BTHK: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + K/2) of each head by the position's angles."""
    cos, sin = (part[..., : x_BTHK.shape[-3], None, :] for part in table)
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def whole_rotary_table(table: Tensor) -> Tensor:
    """Return the table [2, T, 1, K] for `rotate_whole` of one for `rotate`."""
    cos, sin = table
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).unsqueeze(-2)


def rotate_whole(x_BTHK: Tensor, table: Tensor) -> Tensor:
    """Return what `rotate` does in a third of its steps, whose starts are what one position costs."""
    cos, sin = table.unbind()
    return torch.addcmul(x_BTHK * cos, x_BTHK.roll(x_BTHK.shape[-1] // 2, -1), sin)


def dropout(x: Tensor, rate: float, key: Tensor) -> Tensor:
    """Set a share `rate` of x [(N,) ...] to 0 and scale up the rest (Srivastava et al. 2014, section 10).

    key: int32 [(N,) 2]. An element's fate is a hash of its worker's key and its place in that worker's tensor:
    the same for packed and single models, compiled or not, on every device, with no generator to save.
    """
    own = x.shape[key.dim() - 1 :]
    first, second = (part.view(*part.shape, *[1] * len(own)) for part in key.unbind(-1))
    bits = torch.arange(math.prod(own), dtype=torch.int32, device=x.device).view(own) ^ first
    _scramble_(_scramble_(bits).add_(second))
    threshold = min(round(rate * 2**32) - 2**31, 2**31 - 1)
    return x.masked_fill(bits < threshold, 0.0).div_(1 - rate)


def _scramble_(bits: Tensor) -> Tensor:
    """Make every bit of int32 depend on every bit (Wellons 2018, hash prospector's lowbias32), in place."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Return the summed cross-entropy, in nats, of the head's logits x W^T against targets.

    x [(N,) B, T, D], weight [(N,) V, D], targets [(N,) B, T] with IGNORED where there is none; the result has
    shape [N], or [] for one model, and so has `divisor`, which it is divided by. The logits of the whole batch
    never exist: head and loss go through blocks of targets, forward and backward in one pass. total: where the
    weight's gradient is added at once, for a caller that goes on to `backward()` from the result's sum; autograd
    gets none then.
    """
    packed = weight.dim() == 3
    x_M, targets_M = (
        (x.flatten(1, -2), targets.flatten(1)) if packed else (x.flatten(0, -2), targets.flatten())
    )
    loss: Tensor = _HeadLoss.apply(x_M, weight, targets_M, divisor, total)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """Blocks of targets go through head, loss and both gradients; x_MD and weight_VD may lead with N."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        divisor: Tensor | None,
        total_VD: Tensor | None,
    ) -> Tensor:
        head_VD = weight_VD.to(x_MD.dtype)
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        losses = torch.zeros(weight_VD.shape[:-2], dtype=wide, device=x_MD.device)
        factor = (torch.ones_like(losses) if divisor is None else 1 / divisor.to(wide))[..., None, None]
        wants_gradient = any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        if wants_gradient:
            x_gradient = torch.empty_like(x_MD)
            weight_gradient = torch.zeros_like(weight_VD) if total_VD is None else total_VD
        rows = _whole_tiles(
            LOGIT_BLOCK_BYTES // (x_MD.element_size() * weight_VD.shape[-2] * max(1, losses.numel()))
        )
        for start in range(0, x_MD.shape[-2], rows):
            block = slice(start, start + rows)
            x, target = x_MD[..., block, :], targets_M[..., block, None]
            logits_MV = x @ head_VD.mT
            losses += _losses_and_gradient_(logits_MV, target, wants_gradient)
            if wants_gradient:
                counts = target != IGNORED
                x_gradient[..., block, :] = (logits_MV @ head_VD) * (counts * factor)
                _add_product_(weight_gradient, logits_MV.mT, x * counts, factor)
        if wants_gradient:
            kept = weight_gradient if total_VD is None else None
            ctx.save_for_backward(x_gradient, kept)  # type: ignore[arg-type]
        return losses if divisor is None else losses / divisor

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient, weight_gradient = ctx.saved_tensors  # type: ignore[attr-defined]
        factor = upstream[..., None, None]
        of_weight = None if weight_gradient is None else weight_gradient * factor
        return (x_gradient * factor).to(x_gradient.dtype), of_weight, None, None, None


def _whole_tiles(rows: int) -> int:
    """Return how many rows, at most `rows`, a matmul likes: a multiple of 128, but 1 at least."""
    return rows // 128 * 128 if rows >= 128 else max(1, rows)


def _add_product_(total: Tensor, left: Tensor, right: Tensor, factor: Tensor) -> None:
    """Add left @ right * factor to `total`, within the matmul where their dtypes agree."""
    if total.dtype != left.dtype:
        total.addcmul_(left @ right, factor)
    elif total.dim() == 2:
        total.addmm_(left, right * factor)
    else:
        total.baddbmm_(left, right * factor)


def _losses_and_gradient_(logits_MV: Tensor, target_M1: Tensor, wants_gradient: bool) -> Tensor:
    """Return the summed losses, [N] or [], and leave softmax minus one-hot where the logits were, if wanted.

    On a CPU a few rows at a time, so that all passes over them but the first find them in its cache. Only the
    softmax takes exponentials: its largest element is one over their sum, in units of the largest logit's.
    """
    wide = torch.promote_types(logits_MV.dtype, torch.float32)
    losses = torch.zeros(logits_MV.shape[:-2], dtype=wide, device=logits_MV.device)
    rows = logits_MV.shape[-2]
    if logits_MV.device.type == "cpu":
        rows = max(1, STRIP_BYTES // (4 * logits_MV.shape[-1]))
    for start in range(0, logits_MV.shape[-2], rows):
        strip = logits_MV[..., start : start + rows, :]
        target = target_M1[..., start : start + rows, :]
        counts = (target != IGNORED).to(wide)
        target = target.clamp_min(0)
        wide_RV = strip.to(wide, memory_format=torch.contiguous_format)  # the strip itself if it is both
        excess = wide_RV.amax(-1, keepdim=True) - wide_RV.gather(-1, target)
        torch.softmax(wide_RV, dim=-1, out=wide_RV)
        losses += ((excess - wide_RV.amax(-1, keepdim=True).log()) * counts).sum((-2, -1))
        if wants_gradient:
            strip.copy_(wide_RV.scatter_add_(-1, target, -torch.ones_like(counts)))
    return losses
