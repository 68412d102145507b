"""Initial weights: their spread, the loss they start at, and that the seed alone decides them."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_llm.config.compose import compose
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models.decoder import loss_sums
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.packed import PackedLlama

sys.path.append(str(Path(__file__).parents[1]))
from reference.llama import reference_llama
from reference.small import base_config, one_thread  # noqa: F401

SMALL = base_config().model
TINY = compose(["experiment=quickstart"]).config().model
LIKE_20M = replace(compose(["model=20m"]).config().model, layers=2)
RESIDUAL = ("attention.output.weight", "mlp.down.weight")


@pytest.mark.parametrize("model", [TINY, LIKE_20M], ids=["tiny", "20m with 2 layers"])
@pytest.mark.parametrize("seed", [42, 7])
def test_the_loss_starts_within_a_tenth_of_ln_vocabulary(model: ModelConfig, seed: int) -> None:
    parameters = initial_parameters(model, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(model.vocab_size, (2, 2, 128), generator=generator)
    loss = loss_sums(model, parameters, tokens, targets, torch.float32) / targets.numel()
    assert abs(loss.item() - math.log(model.vocab_size)) < 0.1
    with torch.no_grad():
        expected = reference_llama(model, parameters, torch.float32).loss(tokens, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_projections_into_the_residual_stream_start_smaller_and_norms_at_one() -> None:
    model = replace(TINY, layers=6, init_std=0.03)
    for name, value in initial_parameters(model, 1).items():
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        std = 0.03 / math.sqrt(2 * 6) if name.endswith(RESIDUAL) else 0.03
        sigmas = math.sqrt(value.numel())
        assert abs(value.mean().item()) < 5 * std / sigmas, name
        assert abs(value.std().item() / std - 1) < 5 / math.sqrt(2) / sigmas, name
        assert value.abs().max().item() > 3.3 * std, f"{name}: a normal distribution is not cut off"


def test_no_two_matrices_start_alike() -> None:
    matrices = [
        value for value in initial_parameters(replace(SMALL, layers=3), 1).values() if value.dim() == 2
    ]
    starts = {tuple((value.flatten()[:8] / value.std()).tolist()) for value in matrices}
    assert len(starts) == len(matrices)


def test_the_seed_alone_decides() -> None:
    first = initial_parameters(TINY, 42)
    torch.manual_seed(99)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    again, other = initial_parameters(TINY, 42), initial_parameters(TINY, 43)
    torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before), (
        "drawing weights takes nothing from the global generator"
    )
    for name, value in first.items():
        assert torch.equal(again[name], value)
        assert value.dim() == 1 or not torch.equal(other[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_models", [1, 4])
def test_every_worker_starts_as_the_single_model_bit_for_bit(num_models: int, dtype: torch.dtype) -> None:
    expected = initial_parameters(SMALL, 42)
    packed = PackedLlama(SMALL, num_models, seed=42, dtype=dtype)
    for i in range(num_models):
        state = packed.local_state_dict(i)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value.to(dtype)), (i, name)
