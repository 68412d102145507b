"""A GPT-2 in flax.nnx as its users write one: nnx.Embed, nnx.LayerNorm and nnx.Linear, attention in jax.numpy."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="needs jax: pip install 'tiny-llm[flax]'")
nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install 'tiny-llm[flax]'")
jnp = jax.numpy


class Attention(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int, heads: int, rngs: Any) -> None:
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.output = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (part.reshape(batch, length, self.heads, -1) for part in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.reshape(batch, length, width))


class Mlp(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int, ffn_width: int, rngs: Any) -> None:
        self.up = nnx.Linear(width, ffn_width, rngs=rngs)
        self.down = nnx.Linear(ffn_width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int, heads: int, ffn_width: int, rngs: Any) -> None:
        self.attention_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(width, heads, rngs)
        self.mlp_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.mlp = Mlp(width, ffn_width, rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT2(nnx.Module):  # type: ignore[misc, name-defined]
    """Tokens [B, T] in, logits [B, T, V] out; `tied` uses the embedding as head."""

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, layers: int, ffn: int, tied: bool
    ) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.layers = nnx.List([Block(width, heads, ffn, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)
        self.tied = tied

    def __call__(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.embedding.attend(x) if self.tied else self.head(x)
