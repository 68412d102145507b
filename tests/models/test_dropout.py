"""Dropout: what it drops depends on seed, update, micro-batch, worker and place, and on nothing else."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_llm.models import operations as op
from tiny_llm.models.dropout import dropout_keys
from tiny_llm.training.engine import Engine

sys.path.append(str(Path(__file__).parents[1]))
from reference.families import factors
from reference.small import base_config, batches, one_thread, small_config, small_plan  # noqa: F401

MODEL = replace(base_config().model, layers=2, dropout=0.25)
N = 3


def mask(key: Tensor, *shape: int, rate: float = 0.25) -> Tensor:
    """What a tensor of ones becomes."""
    return op.dropout(torch.ones(shape, dtype=torch.float64), rate, key)


def keys(seed: int = 42, update: int = 0, micro_batch: int = 0, workers: Any = range(N)) -> Tensor:
    return dropout_keys(MODEL, seed, update, micro_batch, workers)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999, 1 - 1e-12])
def test_a_mask_is_the_hash_of_its_key_number_by_number(rate: float) -> None:
    for key in keys()[0]:
        expected = factors(tuple(key.tolist()), rate, (3, 5, 7))
        assert torch.equal(mask(key, 3, 5, 7, rate=rate), expected)


def test_the_given_share_is_dropped_and_the_mean_is_kept() -> None:
    for rate in (0.05, 0.25, 0.9):
        ones = mask(keys()[0, 1], 1000, 1000, rate=rate)
        dropped = (ones == 0).double()
        noise = (rate * (1 - rate) / 1e6) ** 0.5
        assert abs(dropped.mean().item() - rate) < 5 * noise
        assert torch.equal(ones.unique(), torch.tensor([0, 1 / (1 - rate)], dtype=torch.float64))
        for axis in (0, 1):
            assert ((dropped.mean(axis) - rate) / (noise * 1000**0.5)).abs().max() < 5, (
                "no row or column stands out"
            )


def test_masks_of_different_places_workers_micro_batches_updates_and_seeds_are_unrelated() -> None:
    sources = [
        keys()[0, 0], keys()[0, 1], keys()[0, 2], keys()[1, 0], keys()[2, 0],
        keys(update=1)[0, 0], keys(micro_batch=1)[0, 0], keys(seed=43)[0, 0],
    ]  # fmt: skip
    masks = [(mask(key, 40_000) == 0).double() for key in sources]
    masks += [masks[0].roll(shift) for shift in (1, 2, 64, 200)]  # and neighbours within a mask
    for first, second in combinations(masks, 2):
        both = (first * second).mean().item()
        assert abs(both - 0.25**2) < 6 * (0.25**2 / 40_000) ** 0.5


def test_a_workers_keys_do_not_depend_on_who_else_is_there() -> None:
    assert torch.equal(keys(workers=[2, 0]), keys()[[2, 0]])
    assert keys().shape == (N, 1 + 3 * MODEL.layers, 2)
    assert keys().unique(dim=1).shape == keys().shape


def test_packed_tensors_drop_what_each_worker_drops_alone() -> None:
    key_N2 = keys()[:, 4]
    x = torch.randn(N, 2, 5, 8, dtype=torch.float64)
    packed = op.dropout(x, 0.25, key_N2)
    for i in range(N):
        assert torch.equal(packed[i], op.dropout(x[i], 0.25, key_N2[i]))


def test_gradients_flow_where_nothing_was_dropped() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: op.dropout(y, 0.25, keys()[0, 0]), (x,))


def config_with(execution: str, dropout: float, precision: str = "fp64") -> Any:
    return small_config(
        model={"layers": 2, "dropout": dropout},
        decentralized={"scheme": "atc", "num_models": 3, "execution": execution},
        optimizer={"grad_clip": None},
        runtime={"precision": precision},
    )


def trained(
    plan: Any, data: list[tuple[Tensor, Tensor]], engine: Engine | None = None, first: int = 0
) -> Engine:
    engine = engine or Engine(plan, torch.device("cpu"))
    for number in range(first, first + len(data)):
        engine.update(number, lambda number=number: data[number - first])  # type: ignore[misc]
    return engine


def test_batched_and_looped_workers_drop_the_same() -> None:
    ends = []
    for execution in ("batched", "looped"):
        plan = small_plan(config_with(execution, 0.25), updates=6)
        ends.append(trained(plan, batches(plan, 6)).model.parameter_storage)
    assert (ends[0] - ends[1]).abs().max() < 1e-12
    plan = small_plan(config_with("looped", 0.0), updates=6)
    assert (trained(plan, batches(plan, 6)).model.parameter_storage - ends[1]).abs().max() > 1e-4


def test_a_fresh_engine_goes_on_with_the_masks_of_an_uninterrupted_one() -> None:
    plan = small_plan(config_with("batched", 0.25), updates=6)
    data = batches(plan, 6)
    whole = trained(plan, data)
    half = trained(plan, data[:3])
    torch.manual_seed(99)  # no generator of the process has a part in it
    other = Engine(plan, torch.device("cpu"))
    other.model.parameter_storage.copy_(half.model.parameter_storage)
    other.optimizer.first_moment_storage.copy_(half.optimizer.first_moment_storage)
    other.optimizer.second_moment_storage.copy_(half.optimizer.second_moment_storage)
    other.optimizer.updates = half.optimizer.updates
    trained(plan, data[3:], other, first=3)
    assert torch.equal(other.model.parameter_storage, whole.model.parameter_storage)


def test_each_micro_batch_of_an_update_has_masks_of_its_own() -> None:
    config = small_config(model={"dropout": 0.5})
    plan = small_plan(config, updates=2, rows=4, micro_batch_size=1)
    engine = Engine(plan, torch.device("cpu"))
    asked = [engine._dropout_keys(update, index) for update, index in product((0, 1), range(4))]
    assert all(key is not None for key in asked)
    assert torch.stack([key for key in asked if key is not None]).unique(dim=0).shape[0] == 8


def test_without_dropout_nothing_is_asked_for_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(config_with("looped", 0.0), updates=2)
    expected = trained(plan, batches(plan, 2)).model.parameter_storage
    monkeypatch.setattr(op, "dropout", None)
    monkeypatch.setattr("tiny_llm.training.engine.dropout_keys", None)
    assert torch.equal(trained(plan, batches(plan, 2)).model.parameter_storage, expected)
