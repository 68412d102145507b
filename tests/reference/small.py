"""Configs and batches that train in milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_llm.config.compose import compose
from tiny_llm.config.parameters import count_parameters, parameter_specs
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.config.schema import Config, ModelConfig
from tiny_llm.decentralized.packed_llama import PackedLlama

ROWS = 2  # sequences of a worker in an update


@functools.cache
def base_config() -> Config:
    """One model of 5,000 parameters on a CPU in fp64, everything else at its default."""
    return compose(
        [
            "model=tiny",
            "data=stdlib",
            "data.vocab_size=257",
            "model.layers=1",
            "model.width=16",
            "model.heads=2",
            "model.ffn_width=24",
            "model.context_length=8",
            "schedule.warmup_steps=4",
            "optimizer.lr=0.01",
            "runtime.device=cpu",
            "runtime.precision=fp64",
            "runtime.compile=false",
        ]
    ).config()


def small_config(**sections: dict[str, Any]) -> Config:
    """`base_config` with keys of some sections replaced: small_config(model={"layers": 2})."""
    config = base_config()
    return replace(
        config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    )


def small_plan(
    config: Config, updates: int = 25, rows: int = ROWS, micro_batch_size: int | None = None
) -> Plan:
    """The Plan of `updates` updates with `rows` sequences a worker in each."""
    tokens = config.decentralized.num_models * rows * config.model.context_length
    training = replace(config.training, batch_tokens=tokens, micro_batch_size=micro_batch_size)
    budget = updates * tokens / count_parameters(config.model)
    training = replace(training, tokens_per_parameter=budget, epoch_tokens_per_parameter=budget)
    plan = make_plan(replace(config, training=training))
    assert plan.updates == updates
    return plan


def batches(plan: Plan, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """`count` global batches of random tokens and targets [N * rows, T]; some targets are -100."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, plan.batch_sequences, plan.config.model.context_length)
    vocabulary = plan.config.model.vocab_size
    tokens = torch.randint(vocabulary, shape, generator=generator)
    targets = torch.randint(vocabulary, shape, generator=generator)
    ignored = (
        torch.rand(shape, generator=generator) < torch.rand(shape[:2], generator=generator)[..., None] / 2
    )
    ignored[..., 0] = False  # no row without a target
    return list(zip(tokens, targets.masked_fill(ignored, -100), strict=True))


def random_state(model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights far from their initial ones, in fp64: attention looks somewhere, norms scale each width apart."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.3
        + (0.0 if spec.decays else 1.0)
        for spec in parameter_specs(model)
    }


def random_packed(model: ModelConfig, num_models: int, dtype: torch.dtype) -> PackedLlama:
    """N models with weights of their own: worker i has random_state(model, i)."""
    packed = PackedLlama(model, num_models, seed=0, dtype=dtype)
    for i in range(num_models):
        row = packed.layout.views(packed.parameter_storage[i])
        for name, value in random_state(model, i).items():
            row[name].copy_(value)
    return packed


def apart(value: Tensor, expected: Tensor) -> float:
    """The distance of two tensors relative to the length of the expected one."""
    expected = expected.detach().double()
    distance, length = (value.detach().double() - expected).norm(), expected.norm()
    return float(distance / length) if length else float(distance)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from threads, and the machine may be busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
