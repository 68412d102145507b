"""The parameters of a decoder, known from its config alone: names, shapes, decay, initialisation.

The Plan counts them, the arenas lay them out, the decoder reads them by name. q, k, v are one matrix and so
are gate and up: each pair of matmuls over the same input is one matmul. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tiny_llm.config.schema import ModelConfig


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter; `std` is that of its normal initialisation, 0 means all zeros, None all ones."""

    name: str
    shape: tuple[int, ...]
    decays: bool
    std: float | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Return every parameter in arena order: those that decay (matrices) first, then norms and biases.

    Projections into the residual stream start at init_std / sqrt(2 layers), the rest at init_std (GPT-2,
    Radford et al. 2019, section 2.3). New kinds of matrices come last: the draws of the others stay.
    """
    specs = [ParameterSpec("embedding.weight", (model.vocab_size, model.width), True, model.init_std)]
    for layer in range(model.layers):
        specs += _layer(model, f"layers.{layer}.")
    specs += _norm(model, "norm", model.width)
    if model.positions == "learned":
        shape = (model.context_length, model.width)
        specs.append(ParameterSpec("positions.weight", shape, True, model.init_std))
    if not model.tied:
        specs.append(ParameterSpec("head.weight", (model.vocab_size, model.width), True, model.init_std))
    return tuple(sorted(specs, key=lambda spec: not spec.decays))


def _layer(model: ModelConfig, prefix: str) -> Iterator[ParameterSpec]:
    width, heads, std = model.width, model.heads * model.head_width, model.init_std
    qkv = heads + 2 * model.groups * model.head_width
    into_residual = std / math.sqrt(2 * model.layers)
    yield from _norm(model, f"{prefix}attention_norm", width)
    yield from _linear(f"{prefix}attention.qkv", (qkv, width), model.qkv_bias, std)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ParameterSpec(f"{prefix}attention.{name}.weight", (model.head_width,), False, None)
    yield from _linear(f"{prefix}attention.output", (width, heads), model.output_bias, into_residual)
    yield from _norm(model, f"{prefix}mlp_norm", width)
    name, rows = ("gate_up", 2 * model.ffn_width) if model.mlp == "swiglu" else ("up", model.ffn_width)
    yield from _linear(f"{prefix}mlp.{name}", (rows, width), model.mlp_bias, std)
    yield from _linear(f"{prefix}mlp.down", (width, model.ffn_width), model.mlp_bias, into_residual)


def _linear(name: str, shape: tuple[int, int], bias: bool, std: float) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{name}.weight", shape, True, std)
    if bias:
        yield ParameterSpec(f"{name}.bias", shape[:1], False, 0.0)


def _norm(model: ModelConfig, name: str, width: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{name}.weight", (width,), False, None)
    if model.norm == "layernorm":
        yield ParameterSpec(f"{name}.bias", (width,), False, 0.0)


@dataclass(frozen=True)
class ParameterCounts:
    """Unique trainable parameters by place; a tied head is its embedding and counts there alone."""

    embedding: int
    head: int
    core: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.core


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Return the parameters that embed tokens and positions, those of the head, and the rest (the core)."""
    counts = {"embedding": 0, "head": 0, "core": 0}
    places = {"embedding.weight": "embedding", "positions.weight": "embedding", "head.weight": "head"}
    for spec in parameter_specs(model):
        counts[places.get(spec.name, "core")] += spec.numel
    return ParameterCounts(**counts)


def count_parameters(model: ModelConfig) -> int:
    """Return the number of unique trainable parameters; the tied embedding counts once."""
    return parameter_counts(model).total
