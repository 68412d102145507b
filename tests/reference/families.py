"""Slow, obvious GPT-2 and Qwen3, and any mixture of their switches, written from the papers' formulas.

They share nothing with the room they check but the names of the parameters: full logits, explicit masks, one
sequence, one head and one query at a time. `dropped` gives the factor of every number that dropout sees.

GPT-2: Radford et al. 2019 (pre-norm, learned positions, GELU). Qwen3: Qwen Team 2025 (RoPE, RMSNorm, q and k
normed head by head, SwiGLU, groups of heads).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tiny_llm.config.schema import ModelConfig

from .llama import rotate

State = dict[str, Tensor]
Dropped = Callable[[int, tuple[int, ...]], Tensor]


class ReferenceFamily:
    """One model over a state by name. `dropped(place, shape)` gives dropout's factors; None: none."""

    def __init__(self, model: ModelConfig, state: State, dropped: Dropped | None = None) -> None:
        self.model, self.state, self.dropped = model, state, dropped

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of tokens [B, T] over the targets that are not -100."""
        logits = self.logits(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    def logits(self, tokens: Tensor) -> Tensor:
        head = self.state["embedding.weight"] if self.model.tied else self.state["head.weight"]
        return self.hidden_states(tokens) @ head.T

    def hidden_states(self, tokens: Tensor) -> Tensor:
        x = self.state["embedding.weight"][tokens]
        if self.model.positions == "learned":
            x = x + self.state["positions.weight"][: tokens.shape[1]]
        x = self._drop(0, x)
        for layer in range(self.model.layers):
            name = f"layers.{layer}"
            heard = self._attention(layer, self._norm(f"{name}.attention_norm", x))
            x = x + self._drop(2 + 3 * layer, heard)
            x = x + self._drop(3 + 3 * layer, self._mlp(f"{name}.mlp", self._norm(f"{name}.mlp_norm", x)))
        return self._norm("norm", x)

    def _drop(self, place: int, x: Tensor) -> Tensor:
        return x if self.dropped is None else x * self.dropped(place, tuple(x.shape))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.state[f"{name}.weight"].T
        return y + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else y

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if self.model.norm == "rmsnorm":
            return rms_norm(x, self.state[f"{name}.weight"], self.model.norm_eps)
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        normed = centred / (variance + self.model.norm_eps).sqrt()
        return normed * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        if self.model.mlp == "gelu":
            up = self._linear(f"{name}.up", x)
            activated = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            both = self._linear(f"{name}.gate_up", x)
            gate, up = both[..., : self.model.ffn_width], both[..., self.model.ffn_width :]
            activated = gate * torch.sigmoid(gate) * up
        return self._linear(f"{name}.down", activated)

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        name, model = f"layers.{layer}.attention", self.model
        heads, groups = model.heads, model.kv_heads or model.heads
        size = model.head_dim or model.width // heads
        rows = self._linear(f"{name}.qkv", x)
        head = [rows[..., first : first + size] for first in range(0, rows.shape[-1], size)]
        queries, keys, values = head[:heads], head[heads : heads + groups], head[heads + groups :]
        heard = []
        for h, query in enumerate(queries):
            key, value = keys[h * groups // heads], values[h * groups // heads]
            if model.qk_norm:
                query = rms_norm(query, self.state[f"{name}.q_norm.weight"], model.norm_eps)
                key = rms_norm(key, self.state[f"{name}.k_norm.weight"], model.norm_eps)
            if model.positions == "rope":
                query, key = (rotate(part[:, None], model.rope_theta)[:, 0] for part in (query, key))
            heard.append(self._weights(layer, h, query, key) @ value)
        return self._linear(f"{name}.output", torch.cat(heard, dim=-1))

    def _weights(self, layer: int, head: int, query: Tensor, key: Tensor) -> Tensor:
        """One head's attention weights [B, T, T]: row t sums to 1 over the positions up to t."""
        batch, length, size = query.shape
        weights = torch.zeros(batch, length, length, dtype=query.dtype)
        for t in range(length):
            scores = (key[:, : t + 1] @ query[:, t, :, None])[..., 0] / math.sqrt(size)
            weights[:, t, : t + 1] = scores.exp() / scores.exp().sum(-1, keepdim=True)
        if self.dropped is None:
            return weights
        shape = (batch, self.model.heads, length, length)
        return weights * self.dropped(1 + 3 * layer, shape)[:, head]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def factors(key: tuple[int, int], rate: float, shape: tuple[int, ...]) -> Tensor:
    """What dropout multiplies by, number by number: 0 or 1 / (1 - rate), from a 32-bit hash of the place."""
    kept = []
    for place in range(math.prod(shape)):
        bits = scrambled((scrambled(place ^ (key[0] % 2**32)) + key[1]) % 2**32)
        signed = bits - 2**32 if bits >= 2**31 else bits
        kept.append(0.0 if signed + 2**31 < round(rate * 2**32) else 1 / (1 - rate))
    return torch.tensor(kept, dtype=torch.float64).view(shape)


def scrambled(bits: int) -> int:
    """lowbias32 of https://nullprogram.com/blog/2018/07/31/."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D % 2**32
    bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
    return bits ^ (bits >> 16)
