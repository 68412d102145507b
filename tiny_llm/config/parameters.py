"""The parameters of a decoder, known from its config alone: names, shapes, decay, initialisation.

The Plan counts them, the arenas lay them out, the decoder reads them by name. q, k, v are one matrix and so
are gate and up: each pair of matmuls over the same input is one matmul. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiny_llm.config.schema import ModelConfig


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter; `std` is that of its normal initialisation, None means all ones."""

    name: str
    shape: tuple[int, ...]
    decays: bool
    std: float | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Return every parameter in arena order: those that decay (matrices) first, then the norms.

    Projections into the residual stream start at init_std / sqrt(2 layers), the rest at init_std (GPT-2,
    Radford et al. 2019, section 2.3).
    """
    matrices = [ParameterSpec("embedding.weight", (model.vocab_size, model.width), True, model.init_std)]
    norms = []
    for layer in range(model.layers):
        matrices += _layer_matrices(model, f"layers.{layer}.")
        norms += [
            ParameterSpec(f"layers.{layer}.{norm}.weight", (model.width,), False, None)
            for norm in ("attention_norm", "mlp_norm")
        ]
    norms.append(ParameterSpec("norm.weight", (model.width,), False, None))
    return (*matrices, *norms)


def _layer_matrices(model: ModelConfig, prefix: str) -> list[ParameterSpec]:
    width, ffn, std = model.width, model.ffn_width, model.init_std
    into_residual = std / math.sqrt(2 * model.layers)
    return [
        ParameterSpec(f"{prefix}attention.qkv.weight", (3 * width, width), True, std),
        ParameterSpec(f"{prefix}attention.output.weight", (width, width), True, into_residual),
        ParameterSpec(f"{prefix}mlp.gate_up.weight", (2 * ffn, width), True, std),
        ParameterSpec(f"{prefix}mlp.down.weight", (width, ffn), True, into_residual),
    ]


def count_parameters(model: ModelConfig) -> int:
    """Return the number of unique trainable parameters; the tied embedding counts once."""
    return sum(spec.numel for spec in parameter_specs(model))


def count_embedding_parameters(model: ModelConfig) -> int:
    return model.vocab_size * model.width
