"""Data parallel: ranks that share a batch train the one model that one process trains on all of it."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_groups import CPU, on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.data.batches import own_rows
from tiny_llm.decentralized.arena import Layout
from tiny_llm.distributed import gradient_sum
from tiny_llm.distributed.gradient_sum import buckets
from tiny_llm.distributed.ranks import Ranks, alone
from tiny_llm.distributed.replicas import ReplicaError
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.engine import Engine, NonFiniteError

sys.path.append(str(Path(__file__).parents[1]))
from reference.llama import reference_llama
from reference.small import apart, batches, one_thread, small_config, small_plan  # noqa: F401
from reference.training import adamw, learning_rate

UPDATES = 25
ROWS, MICRO_BATCH = 8, 2  # sequences of an update, and of a rank's micro-batch
STATE = ("parameters", "first_moment", "second_moment")
SMALL_BUCKETS = 2**11  # bytes
RUNS = {
    2: ("plain", "dropout", "batched", "untied", "untied in fp64"),
    4: ("plain", "dropout", "fp64"),
}  # by size of the group
EACH_RUN = [(world, name) for world, names in RUNS.items() for name in names]

Batches = list[tuple[Tensor, Tensor]]
Outcome = dict[str, Any]


def plan_of(
    precision: str = "fp32", dropout: float = 0.0, execution: str = "auto", tied: bool = True
) -> Plan:
    config = small_config(
        model={"dropout": dropout, "layers": 2, "tied": tied},
        decentralized={"execution": execution},
        optimizer={"grad_clip": 0.3, "lr": 1e-3},  # at 0.01 the updates blow rounding up tenfold
        runtime={"precision": precision},
    )
    return small_plan(config, UPDATES, ROWS, MICRO_BATCH)


PLANS = {
    "plain": plan_of(),
    "dropout": plan_of(dropout=0.1),
    "batched": plan_of(execution="batched"),
    "untied": plan_of(tied=False),
    "fp64": plan_of("fp64"),
    "untied in fp64": plan_of("fp64", tied=False),
}


def unevenly_padded(plan: Plan) -> Batches:
    """Global batches whose second pair of sequences has few targets to count, every fourth time none."""
    data = batches(plan, UPDATES)
    for number, (_, targets) in enumerate(data):
        targets[2:4, 1:] = -100
        if number % 4 == 0:
            targets[2:4] = -100
    return data


def unpadded(plan: Plan) -> Batches:
    generator = torch.Generator().manual_seed(7)
    shape = (UPDATES, 2, ROWS, plan.config.model.context_length)
    return [(pair[0], pair[1]) for pair in torch.randint(257, shape, generator=generator)]


def train(ranks: Ranks, plan: Plan, data: Batches) -> Outcome:
    """Train as one of several ranks and return this rank's own replica."""
    plan = make_plan(plan.config, ranks.world)
    engine, rows = Engine(plan, CPU, ranks), own_rows(plan, ranks.rank)
    numbers = []
    for r, (tokens, targets) in enumerate(data):
        parts = zip(tokens.split(plan.rows_at_once), targets.split(plan.rows_at_once), strict=True)
        mine = iter([(some[rows], others[rows]) for some, others in parts])
        result = engine.update(r, lambda mine=mine: next(mine))
        numbers.append((result.losses, result.norms))
    return {"numbers": numbers, **{name: arena.clone() for name, arena in engine.arenas().items()}}


def train_with_torch(ranks: Ranks, plan: Plan, data: Batches) -> dict[str, Tensor]:
    """Train a plain module in torch's own data parallel on the same shares of the batches."""
    config, dtype = plan.config, torch.float64 if plan.config.runtime.precision == "fp64" else torch.float32
    model = reference_llama(config.model, initial_parameters(config.model, config.runtime.seed), dtype)
    replica = DistributedDataParallel(model)
    optimizer = adamw(list(model.parameters()), config)
    share = ROWS // ranks.world
    own = slice(share * ranks.rank, share * (ranks.rank + 1))
    for r, (tokens, targets) in enumerate(data):
        optimizer.zero_grad()
        logits = replica(tokens[own])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[own].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip or 0, foreach=False)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, r, UPDATES)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def break_one_bit(ranks: Ranks, plan: Plan) -> str:
    """Flip a bit of rank 2's second moment, and return what collecting the state says."""
    engine = Engine(make_plan(plan.config, ranks.world), CPU, ranks)
    engine.collected()
    if ranks.rank == 2:
        engine.optimizer.second_moment_storage.view(torch.int32)[0, 123] ^= 1
    try:
        engine.collected()
    except ReplicaError as error:
        return str(error)
    return "nothing"


def one_nan(ranks: Ranks, plan: Plan, data: Batches) -> tuple[str, bool]:
    """Break the last rank's model and return what the update says, and whether it left the parameters alone."""
    plan = make_plan(plan.config, ranks.world)
    engine, rows = Engine(plan, CPU, ranks), own_rows(plan, ranks.rank)
    if ranks.rank == ranks.world - 1:
        engine.model.worker(0)["norm.weight"].data[0] = torch.nan
    before = engine.model.parameter_storage.clone()
    tokens, targets = data[0]
    try:
        engine.update(0, lambda: (tokens[rows], targets[rows]))
    except NonFiniteError as error:
        return str(error), torch.equal(before.nan_to_num(), engine.model.parameter_storage.nan_to_num())
    return "nothing", False


def everything(ranks: Ranks, plans: dict[str, Plan]) -> dict[str, Any]:
    """Run what a group of this size is for, see RUNS."""
    plain, found = plans["plain"], {}
    for name in RUNS[ranks.world]:
        found[name] = train(ranks, plans[name], unevenly_padded(plans[name]))
    if ranks.world == 4:
        found["unpadded"] = train(ranks, plain, unpadded(plain))
        found["torch"] = train_with_torch(ranks, plain, unpadded(plain))
        found["nan"] = one_nan(ranks, plain, unpadded(plain))
        found["broken"] = break_one_bit(ranks, plain)
    gradient_sum.buckets = functools.partial(buckets, limit=SMALL_BUCKETS)
    found["small buckets"] = train(ranks, plain, unevenly_padded(plain))
    return found


@pytest.fixture(scope="module")
def groups() -> dict[int, list[dict[str, Any]]]:
    """What every rank found, of 2 ranks that add up 2 micro-batches each and of 4 ranks with one each."""
    return {world: on_ranks(world, everything, PLANS) for world in (2, 4)}


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    """One process that adds up 4 micro-batches."""
    return {name: train(alone(CPU), plan, unevenly_padded(plan)) for name, plan in PLANS.items()}


def assert_near(found: Outcome, expected: Outcome, tolerance: float) -> None:
    np.testing.assert_allclose(found["numbers"], expected["numbers"], rtol=tolerance, atol=0)
    for name in STATE:
        assert apart(found[name], expected[name]) < tolerance, name


@pytest.mark.parametrize(("world", "name"), EACH_RUN)
def test_ranks_train_as_one_process_on_the_whole_batch(
    name: str, world: int, groups: dict[int, list[dict[str, Any]]], single: dict[str, Outcome]
) -> None:
    assert make_plan(PLANS[name].config, world).accumulation == 4 // world
    assert_near(groups[world][0][name], single[name], 1e-12 if "fp64" in name else 1e-6)


def test_one_large_micro_batch_is_the_same_batch(groups: dict[int, list[dict[str, Any]]]) -> None:
    training = replace(PLANS["fp64"].config.training, micro_batch_size=ROWS)
    plan = make_plan(replace(PLANS["fp64"].config, training=training))
    assert plan.accumulation == 1
    assert_near(groups[4][0]["fp64"], train(alone(CPU), plan, unevenly_padded(plan)), 1e-12)


@pytest.mark.parametrize(("world", "name"), EACH_RUN)
def test_all_ranks_hold_the_same_bits(name: str, world: int, groups: dict[int, list[dict[str, Any]]]) -> None:
    first, *others = (found[name] for found in groups[world])
    for other in others:
        assert other["numbers"] == first["numbers"]
        for arena in STATE:
            assert torch.equal(other[arena], first[arena])


def test_ranks_train_as_torchs_own_data_parallel(groups: dict[int, list[dict[str, Any]]]) -> None:
    found, expected = groups[4][0]["unpadded"], groups[4][0]["torch"]
    views = Layout.of(parameter_specs(PLANS["plain"].config.model)).views(found["parameters"][0])
    ours, theirs = (torch.cat([part[key].flatten() for key in views]) for part in (views, expected))
    assert apart(ours, theirs) < 1e-6


def test_one_flipped_bit_is_named_with_its_rank_on_all_ranks(
    groups: dict[int, list[dict[str, Any]]],
) -> None:
    said = [found["broken"] for found in groups[4]]
    assert "second_moment of rank 2" in said[0]
    assert said == [said[0]] * 4


def test_a_gradient_that_is_not_finite_stops_all_ranks_before_anything_moves(
    groups: dict[int, list[dict[str, Any]]],
) -> None:
    said = [found["nan"][0] for found in groups[4]]
    assert said[0].startswith("update 1: loss nan")
    assert said == [said[0]] * 4
    assert all(found["nan"][1] for found in groups[4])


@pytest.mark.parametrize("world", [2, 4])
def test_many_buckets_sum_as_one_does(world: int, groups: dict[int, list[dict[str, Any]]]) -> None:
    layout = Layout.of(parameter_specs(PLANS["plain"].config.model))
    assert len(buckets(layout, 4)) == 1
    assert len(buckets(layout, 4, SMALL_BUCKETS)) > 5
    found, expected = groups[world][0]["small buckets"], groups[world][0]["plain"]
    assert_near(found, expected, 1e-6)
    if world == 2:  # a sum of two has no order
        assert torch.equal(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("element_size", [4, 8])
@pytest.mark.parametrize("limit", [1, 2**10, 2**12, 2**14, 2**30])
def test_buckets_cover_every_column_once_within_their_limit(limit: int, element_size: int) -> None:
    layout = Layout.of(parameter_specs(PLANS["plain"].config.model))
    found = buckets(layout, element_size, limit)
    assert [name for _, names in found for name in names] == [entry.name for entry in layout.entries]
    assert (found[0][0].start, found[-1][0].stop) == (0, layout.size)
    assert all(before.stop == after.start for (before, _), (after, _) in pairwise(found))
    for columns, names in found:
        inside = [e for e in layout.entries if columns.start <= e.start < columns.stop]
        assert [entry.name for entry in inside] == names
        assert len(names) == 1 or (columns.stop - columns.start) * element_size <= limit
    for (columns, _), (after, names) in pairwise(found):  # none could have taken the next parameter, too
        following = next(entry for entry in layout.entries if entry.name == names[0])
        joined = after.start + following.padded_numel - columns.start
        assert joined * element_size > limit
