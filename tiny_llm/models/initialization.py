"""Initial weights: a pure function of the model's config and the seed, the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_llm.config.parameters import ParameterSpec, parameter_specs
from tiny_llm.config.schema import ModelConfig


def initial_parameters(model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return every parameter by name, fp32 on the CPU, drawn in arena order from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: _initial(spec, generator) for spec in parameter_specs(model)}


def _initial(spec: ParameterSpec, generator: torch.Generator) -> Tensor:
    if not spec.std:
        return torch.ones(spec.shape) if spec.std is None else torch.zeros(spec.shape)
    return torch.empty(spec.shape).normal_(0.0, spec.std, generator=generator)
