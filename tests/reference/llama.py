"""The slow, obvious twin of `tiny_llm.models`: one plain Llama, written from the papers' formulas.

It shares nothing with the room it checks but the names of the parameters. `loop_rms_norm` and `loop_rotate` go
down to single numbers; `ReferenceLlama` is an ordinary module with full logits, an explicit mask and an explicit
softmax.

B sequences  T positions  R = B T rows  D width  H heads  K head dimension  V vocabulary
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tiny_llm.config.schema import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal self-attention; q, k and v are rows of one matrix, in this order, the heads within each."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads, self.theta = model.heads, model.rope_theta
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.output = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x_RD: Tensor, length: int) -> Tensor:
        """Rows are positions, `length` of each sequence after another."""
        width = x_RD.shape[-1]
        parts = (x_RD @ self.qkv.weight.T).view(-1, length, 3 * self.heads, width // self.heads)
        turned, v = torch.split(parts.transpose(1, 2), [2 * self.heads, self.heads], dim=1)
        q, k = torch.split(rotate(turned, self.theta), self.heads, dim=1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        weights = torch.softmax(scores.masked_fill(future(length), -math.inf), dim=-1)
        heard: Tensor = (weights @ v).transpose(1, 2).reshape(-1, width)
        return torch.matmul(heard, self.output.weight.T)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are rows of one matrix, in this order."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(model.width, 2 * model.ffn_width, bias=False)
        self.down = nn.Linear(model.ffn_width, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.chunk(x @ self.gate_up.weight.T, 2, dim=-1)
        return torch.matmul(functional.silu(gate) * up, self.down.weight.T)


class Block(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = RMSNorm(model.width, model.norm_eps)
        self.mlp = Mlp(model)

    def forward(self, x_RD: Tensor, length: int) -> Tensor:
        x_RD = x_RD + self.attention(self.attention_norm(x_RD), length)
        return torch.add(x_RD, self.mlp(self.mlp_norm(x_RD)))


class ReferenceLlama(nn.Module):
    """Tokens [B, T] in, logits [B, T, V] out; the head is the embedding."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.width)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.width, model.norm_eps)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """[B, T, D]."""
        return self._rows(tokens).view(*tokens.shape, -1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden_states(tokens) @ self.embedding.weight.T

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not -100."""
        logits_RV = self._rows(tokens) @ self.embedding.weight.T
        return functional.cross_entropy(logits_RV, targets.flatten(), ignore_index=-100)

    def _rows(self, tokens: Tensor) -> Tensor:
        x_RD: Tensor = self.embedding(tokens.flatten())
        for layer in self.layers:
            x_RD = layer(x_RD, tokens.shape[1])
        return torch.as_tensor(self.norm(x_RD))


def reference_llama(model: ModelConfig, state: dict[str, Tensor], dtype: torch.dtype) -> ReferenceLlama:
    """The reference with copies of the given weights, in `dtype`."""
    reference = ReferenceLlama(model).to(dtype)
    reference.load_state_dict({name: value.detach().clone() for name, value in state.items()}, strict=True)
    return reference


@functools.cache
def future(length: int) -> Tensor:
    """What position t must not see: [T, T]."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def rotate(x_BHTK: Tensor, theta: float) -> Tensor:
    """RoPE, Su et al. 2021, eq. 34, with the pair (i, i + K/2) where the paper has (2i, 2i + 1)."""
    length, head_dim = x_BHTK.shape[-2:]
    cos, sin = (part.to(x_BHTK.dtype) for part in turns(length, head_dim, theta))
    return x_BHTK * cos + torch.roll(x_BHTK, head_dim // 2, dims=-1) * sin


@functools.cache
def turns(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """What x_i and its partner are multiplied with: cos [T, K], and sin [T, K] with its sign."""
    cos, sin = torch.zeros(2, length, head_dim, dtype=torch.float64)
    for t in range(length):
        for i in range(head_dim // 2):
            angle, partner = t * theta ** (-2 * i / head_dim), i + head_dim // 2
            cos[t, i] = cos[t, partner] = math.cos(angle)
            sin[t, i], sin[t, partner] = -math.sin(angle), math.sin(angle)
    return cos, sin


def loop_rms_norm(
    x_TD: NDArray[np.float64], weight_D: NDArray[np.float64], eps: float
) -> NDArray[np.float64]:
    """RMSNorm, one number at a time."""
    result = np.zeros_like(x_TD)
    for t in range(x_TD.shape[0]):
        total = 0.0
        for d in range(x_TD.shape[1]):
            total += float(x_TD[t, d]) ** 2
        rms = math.sqrt(total / x_TD.shape[1] + eps)
        for d in range(x_TD.shape[1]):
            result[t, d] = x_TD[t, d] / rms * weight_D[d]
    return result


def loop_rotate(x_TK: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
    """RoPE of one head, one pair at a time."""
    result = np.zeros_like(x_TK)
    length, head_dim = x_TK.shape
    for t in range(length):
        for i in range(head_dim // 2):
            angle = t / theta ** (2 * i / head_dim)
            a, b = x_TK[t, i], x_TK[t, i + head_dim // 2]
            result[t, i] = a * math.cos(angle) - b * math.sin(angle)
            result[t, i + head_dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return result


def loop_attention(
    q_TK: NDArray[np.float64], k_TK: NDArray[np.float64], v_TK: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Causal attention of one head, one query at a time, from rotated q and k."""
    result = np.zeros_like(v_TK)
    for t in range(len(q_TK)):
        scores = [float(q_TK[t] @ k_TK[s]) / math.sqrt(q_TK.shape[1]) for s in range(t + 1)]
        weights = [math.exp(score) for score in scores]
        for s in range(t + 1):
            result[t] += weights[s] / sum(weights) * v_TK[s]
    return result
