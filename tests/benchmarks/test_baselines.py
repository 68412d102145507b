"""The ways that the product is measured against train the same models, and only the strong ones get its settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import baselines
import pytest
import textbook
import torch
from torch import Tensor

from tiny_llm.config.plan import Plan
from tiny_llm.training import device

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, one_thread, small_config, small_plan  # noqa: F401

EAGER = [name for name in baselines.BASELINES if "compiled" not in name]


@pytest.fixture(autouse=True)
def torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in baselines.TORCHS_KERNELS:
        monkeypatch.setattr(*place)


def plan() -> Plan:
    return small_plan(small_config(decentralized={"scheme": "awc", "num_models": 3}, model={"layers": 2}))


def weights(way: Any) -> dict[str, Tensor]:
    """The stacked weights of a way, q, k, v, gate and up apart."""
    if hasattr(way, "stacked"):
        return textbook.separated(way.stacked)
    stacked = {name: torch.stack([model[name] for model in way.models]) for name in way.models[0]}
    return textbook.separated(stacked)


@pytest.mark.parametrize("name", EAGER[1:])
def test_every_way_takes_the_same_first_update(name: str) -> None:
    """All workers begin alike, so that mixing changes nothing yet; the clipping, norm by norm, does."""
    found, expected = (baselines.BASELINES[way](plan(), torch.float64) for way in (name, EAGER[0]))
    start = {key: value.detach().clone() for key, value in weights(expected).items()}
    shape = (2, 3, 2, plan().config.model.context_length)
    tokens_NBT, targets_NBT = torch.randint(257, shape, generator=torch.Generator().manual_seed(0))
    for way in (found, expected):
        way.update(tokens_NBT, targets_NBT)
    for key, value in weights(expected).items():
        assert apart(value, start[key]) > 1e-5, key
        assert apart(weights(found)[key], value) < 1e-9, key


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_textbook_ways_run_with_torch_as_it_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(device, "keep_freed_memory", lambda: kept.append(name))
    assert baselines.prepare(name, plan().config).type == "cpu"
    assert bool(kept) == (name in baselines.OUR_DECODER)


def test_a_model_that_is_no_llama_leaves_the_textbook_out() -> None:
    assert baselines.left_out(plan().config.model) == []
    other = small_config(model={"qk_norm": True}).model
    assert baselines.left_out(other) == ["vmap", "textbook packing", "textbook packing, compiled"]
