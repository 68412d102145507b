"""A Llama as a researcher writes it from its definition, with stock torch and nothing of the product's.

N workers  B sequences  T positions  D width  H heads  K head dimension  O outputs  V vocabulary

Separate projections, the rotation of whole heads by cosines and sines, torch's own norm and attention, the full
logits. Parameters with a leading worker axis make the same code N packed models: bmm in place of linear, N in the
batch dimension of attention. bf16 is torch.autocast over fp32 weights, which works under vmap and compiled, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tiny_llm.config.schema import ModelConfig

Parameters = Mapping[str, Tensor]


def is_llama(model: ModelConfig) -> bool:
    """Whether this decoder computes the model: a Llama with as many key as query heads, no bias, a tied head."""
    llama = (model.norm, model.mlp, model.positions) == ("rmsnorm", "swiglu", "rope")
    more = model.qk_norm or model.qkv_bias or model.output_bias or model.mlp_bias or model.dropout
    return llama and model.tied and not more and model.groups == model.heads


def separated(parameters: Parameters) -> dict[str, Tensor]:
    """Return the product's parameters with q, k, v and gate, up each as a matrix of its own."""
    result = {}
    for name, value in parameters.items():
        for fused, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
            if f".{fused}." in name:
                chunks = value.chunk(len(parts), dim=-2)
                names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
                result.update(zip(names, chunks, strict=True))
                break
        else:
            result[name] = value
    return result


def mean_loss(
    model: ModelConfig, parameters: Parameters, tokens: Tensor, targets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the mean cross-entropy of tokens and targets [(N,) B, T]: [], or [N] for packed models."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = logits_of(model, parameters, tokens)
    logits = logits.to(parameters["embedding.weight"].dtype)
    losses = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean((-2, -1))


def logits_of(model: ModelConfig, parameters: Parameters, tokens: Tensor) -> Tensor:
    """Return logits [(N,) B, T, V] of tokens [(N,) B, T]."""
    angles = rotary_angles(model, tokens.shape[-1], parameters["embedding.weight"])
    x = embedding(tokens, parameters["embedding.weight"])
    for layer in range(model.layers):
        prefix = f"layers.{layer}."
        own = {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}
        x = x + attention(model, own, rms_norm(x, own["attention_norm.weight"], model.norm_eps), angles)
        x = x + swiglu(own, rms_norm(x, own["mlp_norm.weight"], model.norm_eps))
    return linear(rms_norm(x, parameters["norm.weight"], model.norm_eps), parameters["embedding.weight"])


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return functional.embedding(tokens, weight)
    worker_N11 = torch.arange(len(weight), device=tokens.device)[:, None, None]
    return weight[worker_N11, tokens]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T: [(N,) B, T, D] and [(N,) O, D] give [(N,) B, T, O]."""
    if weight.dim() == 2:
        return functional.linear(x, weight)
    return torch.bmm(x.flatten(1, 2), weight.mT).unflatten(1, x.shape[1:3])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dim() == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x, x.shape[-1:], eps=eps) * weight[:, None, None]


def attention(model: ModelConfig, own: Parameters, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return the output projection of causal self-attention over x [(N,) B, T, D]."""
    q, k, v = (heads_of(model, linear(x, own[f"attention.{name}.weight"])) for name in "qkv")
    q, k = rotated(q, angles), rotated(k, angles)
    heard = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(heard.transpose(1, 2).reshape(x.shape), own["attention.output.weight"])


def heads_of(model: ModelConfig, x: Tensor) -> Tensor:
    """Return [B or N B, H, T, K] of [(N,) B, T, D]."""
    return x.reshape(-1, x.shape[-2], model.heads, model.head_width).transpose(1, 2)


def rotary_angles(model: ModelConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, K] of position * theta^(-2i/K) (Su et al. 2021, eq. 34), each pair's twice."""
    exponent = torch.arange(0, model.head_width, 2, device=like.device, dtype=torch.float64)
    rates = model.rope_theta ** (-exponent / model.head_width)
    angle = torch.outer(torch.arange(length, device=like.device, dtype=torch.float64), rates).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + K/2) of each head by its position's angles, in the dtype of x."""
    cos, sin = (part.to(x.dtype) for part in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def swiglu(own: Parameters, x: Tensor) -> Tensor:
    gate, up = (linear(x, own[f"mlp.{name}.weight"]) for name in ("gate", "up"))
    return linear(functional.silu(gate) * up, own["mlp.down.weight"])
