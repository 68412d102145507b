"""Initial weights of every preset: near ln(vocab), zero biases, and a Llama's draws as they have always been."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_llm.config.compose import compose, config_groups
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models.decoder import loss_sums
from tiny_llm.models.initialization import initial_parameters

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import base_config, one_thread  # noqa: F401

PRESETS = config_groups()["model"]
SMALL = replace(base_config().model, layers=3)
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
FULL = replace(SMALL, norm="layernorm", positions="learned", qk_norm=True, tied=False, **BIASES)


def preset(name: str) -> ModelConfig:
    return compose([f"model={name}", "data=stdlib"]).config().model


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_starts_near_ln_vocabulary(name: str) -> None:
    model = replace(preset(name), layers=2)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(model.vocab_size, (2, 4, 128), generator=generator)
    with torch.no_grad():
        loss = (
            loss_sums(model, initial_parameters(model, 42), tokens, targets, torch.float32) / targets.numel()
        )
    spread = model.width * model.init_std**2  # variance of the logits of a normed state
    assert (
        abs(loss.item() - (math.log(model.vocab_size) + spread / 2))
        < 4 * math.sqrt(spread / targets.numel()) + 0.01
    )
    assert abs(loss.item() - math.log(model.vocab_size)) < 0.35


def test_a_tied_head_under_embeddings_of_unit_spread_starts_far_away() -> None:
    model = replace(preset("gpt2-small"), layers=1, tied=True, init_std=1.0)
    tokens = torch.randint(model.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = loss_sums(model, initial_parameters(model, 0), tokens, tokens.roll(-1), torch.float32) / 64
    assert loss > 100, "so N(0, 0.02) is the default everywhere"
    assert {preset(name).init_std for name in PRESETS} == {0.02}


def test_biases_start_at_zero_norms_at_one_and_matrices_at_their_spread() -> None:
    parameters = initial_parameters(FULL, 3)
    into_residual = FULL.init_std / math.sqrt(2 * FULL.layers)
    for name, value in parameters.items():
        if name.endswith(".bias"):
            assert not value.any(), name
        elif name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            std = into_residual if name.endswith(("output.weight", "down.weight")) else FULL.init_std
            assert abs(value.std().item() / std - 1) < 5 / math.sqrt(2 * value.numel()), name
    assert sum(name.endswith(".bias") for name in parameters) == 3 * (2 + 4) + 1
    assert not torch.equal(parameters["head.weight"], parameters["embedding.weight"])


def test_a_llama_draws_its_matrices_in_the_order_of_ever() -> None:
    generator = torch.Generator().manual_seed(42)
    into_residual = 0.02 / math.sqrt(2 * SMALL.layers)
    width, ffn = SMALL.width, SMALL.ffn_width
    expected = [("embedding.weight", (SMALL.vocab_size, width), 0.02)]
    for layer in range(SMALL.layers):
        expected += [
            (f"layers.{layer}.attention.qkv.weight", (3 * width, width), 0.02),
            (f"layers.{layer}.attention.output.weight", (width, width), into_residual),
            (f"layers.{layer}.mlp.gate_up.weight", (2 * ffn, width), 0.02),
            (f"layers.{layer}.mlp.down.weight", (width, ffn), into_residual),
        ]
    parameters = initial_parameters(SMALL, 42)
    for name, shape, std in expected:
        assert torch.equal(parameters[name], torch.empty(shape).normal_(0.0, std, generator=generator)), name


def test_switches_that_add_parameters_leave_the_draws_of_the_others() -> None:
    plain, full = initial_parameters(SMALL, 42), initial_parameters(FULL, 42)
    for name, value in plain.items():
        assert torch.equal(full[name], value), name
