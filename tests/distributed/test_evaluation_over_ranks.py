"""Ranks that share an evaluation, average weights or measure consensus find what one process finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_groups import CPU, on_ranks

from tiny_llm.config.plan import make_plan
from tiny_llm.config.schema import Config
from tiny_llm.data.cache import TokenCache, cache_directory
from tiny_llm.decentralized.consensus import consensus_error
from tiny_llm.distributed.ranks import Ranks, alone
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.engine import Engine
from tiny_llm.training.evaluation import Evaluation, Evaluator

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, one_thread, small_config, small_plan  # noqa: F401

WORLDS = (2, 4)
BATCH_SIZES = (1, 3, 7, 8, 64)  # of 16 blocks: 16, 6, 3, 2 and 1 batches
PRECISIONS = ("fp64", "fp32")
WORKERS = 8


def evaluate(ranks: Ranks, config: Config) -> dict[tuple[str, int], list[Evaluation]]:
    """Evaluate the subset in batches of each size, and the whole split in those of one."""
    cache = TokenCache.open(cache_directory(config.data), config.data)
    found = {}
    for precision in PRECISIONS:
        dtype = torch.float64 if precision == "fp64" else torch.float32
        weights = {name: value.to(dtype) for name, value in initial_parameters(config.model, 3).items()}
        for size in BATCH_SIZES:
            settings = replace(
                config,
                runtime=replace(config.runtime, precision=precision),
                evaluation=replace(config.evaluation, batch_size=size),
            )
            evaluator = Evaluator(settings, cache, CPU, ranks)
            found[precision, size] = [evaluator.subset(weights)]
            if size == 7:
                found[precision, size].append(evaluator.full(weights))
    return found


def measure(ranks: Ranks, precision: str, rows_ND: torch.Tensor) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Return the average weights and the consensus error of workers of which this rank has its share."""
    config = small_config(
        decentralized={"scheme": "awc", "num_models": WORKERS}, runtime={"precision": precision}
    )
    plan = make_plan(small_plan(config).config, ranks.world)
    engine = Engine(plan, CPU, ranks)
    own = engine.model.parameter_storage
    own.copy_(rows_ND[engine.workers.start : engine.workers.stop, : own.shape[1]])
    return engine.average_weights(), consensus_error(own, WORKERS, ranks.sum_)


def everything(ranks: Ranks, config: Config, rows_ND: torch.Tensor) -> Any:
    return evaluate(ranks, config), {name: measure(ranks, name, rows_ND) for name in PRECISIONS}


@pytest.fixture(scope="module")
def rows_ND() -> torch.Tensor:
    """Workers some way from one another and from zero."""
    generator = torch.Generator().manual_seed(0)
    return 0.3 + torch.randn(WORKERS, 10_000, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def single(tiny_config: Config, rows_ND: torch.Tensor) -> Any:
    return everything(alone(CPU), tiny_config, rows_ND)


@pytest.fixture(scope="module")
def groups(tiny_config: Config, rows_ND: torch.Tensor) -> dict[int, Any]:
    return {world: on_ranks(world, everything, tiny_config, rows_ND) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", BATCH_SIZES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_a_shared_evaluation_finds_the_loss_of_one_process(
    precision: str, tolerance: float, size: int, world: int, groups: dict[int, Any], single: Any
) -> None:
    expected = single[0][precision, size]
    for found, _ in groups[world]:
        for evaluation, alone_ in zip(found[precision, size], expected, strict=True):
            assert evaluation.targets == alone_.targets
            assert evaluation.loss == pytest.approx(alone_.loss, rel=tolerance, abs=0)


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_know_the_same_loss(world: int, groups: dict[int, Any]) -> None:
    first, *others = (found for found, _ in groups[world])
    assert others == [first] * (world - 1)


def test_the_batches_are_as_uneven_as_they_should_be(tiny_config: Config, single: Any) -> None:
    assert tiny_config.evaluation.subset_blocks == 16
    counts = [-(-16 // size) for size in BATCH_SIZES]
    assert counts == [16, 6, 3, 2, 1]
    subset, full = single[0]["fp64", 7]
    assert full.targets > 4 * subset.targets


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_the_average_of_workers_on_ranks_is_their_average(
    precision: str, tolerance: float, world: int, groups: dict[int, Any], single: Any, rows_ND: torch.Tensor
) -> None:
    expected = single[1][precision][0]
    whole = torch.cat([value.flatten() for value in expected.values()]).double()
    for _, found in groups[world]:
        average = torch.cat([found[precision][0][name].flatten() for name in expected])
        assert apart(average, whole) < tolerance
    embedding = next(iter(expected.values())).flatten()
    assert apart(embedding, rows_ND.mean(0)[: len(embedding)]) < tolerance


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_the_consensus_error_of_workers_on_ranks_is_theirs(
    precision: str, tolerance: float, world: int, groups: dict[int, Any], single: Any
) -> None:
    expected = single[1][precision][1]
    assert min(expected) > 1
    for _, found in groups[world]:
        assert found[precision][1] == pytest.approx(expected, rel=tolerance, abs=0)
