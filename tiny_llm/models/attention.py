"""Causal self-attention over q, k, v side by side: heads, their norms and rotation, the softmax.

N workers  B sequences  M sequences of all workers  T positions  S positions attended to
H query heads  G key/value heads  K head dimension

Query head h listens to key/value head h * G // H (Ainslie et al. 2023); G = H is ordinary attention. Without
dropout the fused kernel of torch does it all; with dropout the attention weights are written out, so that
their masks can be the same for packed and for single models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import operations as op
from tiny_llm.models.cache import CachedPositions
from tiny_llm.models.cpu_attention import causal_attention

Parts = tuple[Tensor, Tensor, Tensor]  # q, k and v


def attend(
    model: ModelConfig,
    parameters: Mapping[str, Tensor],
    layer: int,
    qkv: Tensor,
    dropout_key: Tensor | None = None,
    cached: CachedPositions | None = None,
) -> Tensor:
    """Return each position's mixture of values: [(N,) B, T, (H + 2 G) K] gives [(N,) B, T, H K].

    parameters: the layer's own. dropout_key: [(N,) 2] of the attention weights' masks, None for none. cached:
    where these positions stand and what came before them; None for whole sequences from position 0.
    """
    parts = _heads(model, parameters, qkv)
    if cached is not None:
        mixed_MTHK = _cached_attention(parts, layer, cached)
    else:
        table = None
        if model.positions == "rope":
            table = op.rotary_table(qkv.shape[-2], model.head_width, model.rope_theta, qkv.device, qkv.dtype)
        if dropout_key is not None:
            mixed_MTHK = dropped_attention(*_rotated(*parts, table), model.dropout, dropout_key)
        else:
            mixed_MTHK = (causal_attention if qkv.is_cpu else plain_attention)(*parts, table)
    return mixed_MTHK.reshape(*qkv.shape[:-1], model.heads * model.head_width)


def _rotated(q_MTHK: Tensor, k_MTGK: Tensor, v_MTGK: Tensor, table: Tensor | None) -> Parts:
    if table is None:
        return q_MTHK, k_MTGK, v_MTGK
    return op.rotate(q_MTHK, table), op.rotate(k_MTGK, table), v_MTGK


def plain_attention(q_MTHK: Tensor, k_MTGK: Tensor, v_MTGK: Tensor, table: Tensor | None) -> Tensor:
    """Return what `causal_attention` does, of torch's own kernels: [M, T, H, K]."""
    return fused_attention(*_rotated(q_MTHK, k_MTGK, v_MTGK, table))


def _cached_attention(parts: Parts, layer: int, cached: CachedPositions) -> Tensor:
    """Return the mixture of what the cache holds and these positions, which join it."""
    q_MTHK, k_MTGK, v_MTGK = parts
    if cached.angles is not None:
        q_MTHK, k_MTGK = (op.rotate_whole(part, cached.angles) for part in (q_MTHK, k_MTGK))
    k_MSGK, v_MSGK = cached.extend(layer, k_MTGK, v_MTGK)
    return fused_attention(q_MTHK, k_MSGK, v_MSGK, cached.allowed_BTS, causal=False)


def _heads(model: ModelConfig, parameters: Mapping[str, Tensor], qkv: Tensor) -> Parts:
    """Return q [M, T, H, K] and k, v [M, T, G, K]; q and k normed where the model norms them."""
    counts = (model.heads, model.groups, model.groups)
    parts = list(torch.split(qkv, [count * model.head_width for count in counts], dim=-1))
    if model.qk_norm:
        for i, name in enumerate(("q_norm", "k_norm")):
            heads = parts[i].reshape(*qkv.shape[:-2], -1, model.head_width)  # [(N,) B, T H, K]
            weight = parameters[f"attention.{name}.weight"]
            parts[i] = op.rms_norm(heads, weight, model.norm_eps)
    q, k, v = (
        part.reshape(-1, qkv.shape[-2], count, model.head_width)
        for part, count in zip(parts, counts, strict=True)
    )
    return q, k, v


def fused_attention(
    q_MTHK: Tensor, k_MSGK: Tensor, v_MSGK: Tensor, allowed_BTS: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, causal or over the `allowed` positions (None: all): [M, T, H, K]."""
    grouped = {} if q_MTHK.shape[2] == k_MSGK.shape[2] else {"enable_gqa": True}
    mixed_MHTK = functional.scaled_dot_product_attention(
        q_MTHK.transpose(1, 2),
        k_MSGK.transpose(1, 2),
        v_MSGK.transpose(1, 2),
        attn_mask=None if allowed_BTS is None else allowed_BTS[:, None],
        is_causal=causal,
        **grouped,
    )
    return mixed_MHTK.transpose(1, 2)


def dropped_attention(q_MTHK: Tensor, k_MTGK: Tensor, v_MTGK: Tensor, rate: float, key: Tensor) -> Tensor:
    """Return dropout(softmax(q k^T / sqrt(K))) v, causal, with weights that reduce in fp32 at least."""
    heads, length = q_MTHK.shape[2], q_MTHK.shape[1]
    q_MHTK, k_MHTK, v_MHTK = (
        part.repeat_interleave(heads // part.shape[2], dim=2).transpose(1, 2)
        for part in (q_MTHK, k_MTGK, v_MTGK)
    )
    scores_MHTT = q_MHTK @ k_MHTK.mT / math.sqrt(q_MTHK.shape[-1])
    future_TT = torch.ones(length, length, dtype=torch.bool, device=q_MTHK.device).triu(1)
    wide = torch.promote_types(scores_MHTT.dtype, torch.float32)
    weights_MHTT = torch.softmax(scores_MHTT.masked_fill_(future_TT, -torch.inf), -1, wide)
    by_worker = weights_MHTT.view(*key.shape[:-1], -1, *weights_MHTT.shape[1:])  # [(N,) B, H, T, T]
    dropped_MHTT = op.dropout(by_worker, rate, key).view_as(weights_MHTT)
    return (dropped_MHTT.to(q_MTHK.dtype) @ v_MHTK).transpose(1, 2)
