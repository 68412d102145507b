"""Where workers live changes no number: N in one process, one a rank, or two a rank train the same run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_groups import CPU, on_ranks

from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.data.batches import own_rows
from tiny_llm.decentralized.topology import TOPOLOGY_NAMES, make_topology
from tiny_llm.distributed.gossip import messages
from tiny_llm.distributed.ranks import Ranks, alone
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.engine import Engine

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, batches, one_thread, small_config, small_plan  # noqa: F401
from reference.training import HandTrainedWorkers

UPDATES = 25
MOVES = (8, 17)  # the updates before which the moving run changes its placement
STATE = ("parameters", "first_moment", "second_moment")


@dataclass(frozen=True)
class Case:
    """One run; gamma sinks below 1 from its first third on."""

    scheme: str
    topology: str
    k: int = 1
    num_models: int = 4
    mix_every: int = 1
    dropout: float = 0.0
    clip: float | None = 1.0
    execution: str = "looped"

    def __str__(self) -> str:
        marks = {
            f"{self.k}": self.k > 1,
            f"-N{self.num_models}": self.num_models != 4,
            f"-every{self.mix_every}": self.mix_every > 1,
            "-dropout": self.dropout > 0,
            f"-clip{self.clip}": self.clip != 1.0,
            f"-{self.execution}": self.execution != "looped",
        }
        return f"{self.scheme}-{self.topology}" + "".join(mark for mark, shown in marks.items() if shown)

    def plan(self) -> Plan:
        return small_plan(
            small_config(
                model={"dropout": self.dropout},
                decentralized={
                    "scheme": self.scheme,
                    "num_models": self.num_models,
                    "execution": self.execution,
                    "mix_every": self.mix_every,
                },
                topology={"name": self.topology, "k": self.k, "seed": 3},
                adaptive_consensus={"enabled": True, "start_frac": 0.3, "p": 1.0},
                optimizer={"grad_clip": self.clip},
                runtime={"precision": "fp32"},
            ),
            UPDATES,
        )

    @property
    def averages_all(self) -> bool:
        """Whether some step gives every worker the mean of all, which ranks sum in another order; two just meet."""
        if self.num_models == 2:
            return False
        topology = make_topology(self.topology, self.num_models, self.k, 3)
        return any(bool(np.all(topology.matrix(t) == 1 / self.num_models)) for t in range(UPDATES))


SCHEMES = ("awc", "atc")
FOURS = [
    *(Case(*run) for run in product(SCHEMES, TOPOLOGY_NAMES)),
    *(Case(scheme, "base_k", k=2) for scheme in SCHEMES),
    *(Case(scheme, "one_peer_exponential", mix_every=2, dropout=0.1) for scheme in SCHEMES),
    Case("atc", "one_peer_ring", dropout=0.1),
    Case("awc", "random_matching", clip=0.3),
    Case("awc", "complete", mix_every=2, dropout=0.1),
    Case("atc", "ring", clip=None),
]
EIGHTS = [
    Case(scheme, topology, num_models=8)
    for scheme, topology in (
        ("awc", "torus"),
        ("atc", "base_k"),
        ("atc", "complete"),
    )
]
TWOS = [Case(scheme, "complete", num_models=2) for scheme in SCHEMES]
BATCHED = [Case("awc", "one_peer_exponential", num_models=8, execution="batched")]

MOVING, STAYING = FOURS[::2], FOURS[1::2]  # every topology is in both, with one scheme each

Outcome = dict[str, Any]
Outcomes = dict[Case, Outcome]


def train(
    ranks: Ranks, whole: Plan, start: int = 0, stop: int = UPDATES, state: Outcome | None = None
) -> Outcome:
    """Train updates start to stop as one of several ranks and return all numbers.

    The first rank returns the state, too, and `left`: what it was at the first move.
    """
    plan = make_plan(whole.config, ranks.world)
    engine, rows = Engine(plan, CPU, ranks), own_rows(plan, ranks.rank)
    if state is not None:
        for name, arena in engine.arenas().items():
            arena.copy_(state[name][engine.workers.start : engine.workers.stop])
        engine.optimizer.updates = start
    numbers, left = [], {}
    for r, (tokens, targets) in list(enumerate(batches(whole, UPDATES)))[start:stop]:
        if r == MOVES[0]:
            left = {name: arena.clone() for name, arena in (engine.collected() or {}).items()}
        result = engine.update(r, lambda batch=(tokens[rows], targets[rows]): batch)
        numbers.append((result.losses, result.norms))
    return {"numbers": numbers, "left": left, **(engine.collected() or {})}


def train_all(ranks: Ranks, plans: list[Plan]) -> list[Outcome]:
    return [train(ranks, plan) for plan in plans]


def train_on(ranks: Ranks, plans: list[Plan], states: list[Outcome], start: int, stop: int) -> list[Outcome]:
    return [train(ranks, plan, start, stop, state) for plan, state in zip(plans, states, strict=True)]


def on_several(world: int, cases: list[Case]) -> Outcomes:
    """The first rank's outcomes, after a look whether the others found the same numbers."""
    first, *others = on_ranks(world, train_all, [case.plan() for case in cases])
    for other in others:
        assert [outcome["numbers"] for outcome in other] == [outcome["numbers"] for outcome in first]
    return dict(zip(cases, first, strict=True))


@pytest.fixture(scope="module")
def packed() -> Outcomes:
    """All workers in this one process."""
    return {case: train(alone(CPU), case.plan()) for case in (*FOURS, *EIGHTS, *BATCHED, *TWOS)}


@pytest.fixture(scope="module")
def one_a_rank() -> Outcomes:
    return on_several(4, FOURS)


@pytest.fixture(scope="module")
def on_two_or_four() -> Outcomes:
    return on_several(2, [*STAYING, *TWOS]) | on_several(4, [*EIGHTS, *BATCHED])


@pytest.fixture(scope="module")
def moving(one_a_rank: Outcomes) -> Outcomes:
    """Begun in 4 ranks, gone on with in one process, ended in 2 ranks."""
    plans = [case.plan() for case in MOVING]
    begun = [one_a_rank[case] for case in MOVING]
    middle = train_on(alone(CPU), plans, [outcome["left"] for outcome in begun], *MOVES)
    ended = on_ranks(2, train_on, plans, middle, MOVES[1], UPDATES)[0]
    for outcome, first, second in zip(ended, begun, middle, strict=True):
        outcome["numbers"] = first["numbers"][: MOVES[0]] + second["numbers"] + outcome["numbers"]
    return dict(zip(MOVING, ended, strict=True))


def assert_same(case: Case, found: Outcome, expected: Outcome) -> None:
    """To the last bit; where all are averaged, or matrix products are batched otherwise, to 1e-6."""
    exact = not case.averages_all and case.execution == "looped"
    np.testing.assert_allclose(found["numbers"], expected["numbers"], rtol=0 if exact else 1e-6, atol=0)
    for name in STATE:
        if exact:
            assert torch.equal(found[name], expected[name]), name
        for i, (row, other) in enumerate(zip(found[name], expected[name], strict=True)):
            assert apart(row, other) < 1e-6, (name, i)


@pytest.mark.parametrize("case", FOURS, ids=str)
def test_one_worker_a_rank_trains_as_all_in_one_process(
    case: Case, one_a_rank: Outcomes, packed: Outcomes
) -> None:
    assert_same(case, one_a_rank[case], packed[case])


@pytest.mark.parametrize("case", [*STAYING, *EIGHTS, *BATCHED], ids=str)
def test_two_workers_a_rank_train_as_all_in_one_process(
    case: Case, on_two_or_four: Outcomes, packed: Outcomes
) -> None:
    assert_same(case, on_two_or_four[case], packed[case])


@pytest.mark.parametrize("case", TWOS, ids=str)
def test_two_workers_on_two_ranks_train_to_the_same_bits_even_where_all_are_averaged(
    case: Case, on_two_or_four: Outcomes, packed: Outcomes
) -> None:
    assert_same(case, on_two_or_four[case], packed[case])


@pytest.mark.parametrize("case", MOVING, ids=str)
def test_a_run_that_moves_from_four_ranks_to_one_and_to_two_trains_on_as_if_it_had_stayed(
    case: Case, moving: Outcomes, packed: Outcomes
) -> None:
    assert_same(case, moving[case], packed[case])


@pytest.mark.parametrize(
    "case", [case for case in FOURS if case.scheme == "awc" and not case.dropout], ids=str
)
def test_ranks_train_as_models_trained_by_hand(case: Case, one_a_rank: Outcomes) -> None:
    plan = case.plan()
    initial = initial_parameters(plan.config.model, plan.config.runtime.seed)
    hand = HandTrainedWorkers(plan.config, UPDATES, initial, torch.float32)
    expected = [hand.update(r, *batch) for r, batch in enumerate(batches(plan, UPDATES))]
    np.testing.assert_allclose(one_a_rank[case]["numbers"], expected, rtol=1e-5, atol=0)
    layout = Engine(plan, CPU).model.layout
    assert hand.weakest < 0.9
    for row, model in zip(one_a_rank[case]["parameters"], hand.models, strict=True):
        views, parameters = layout.views(row), dict(model.named_parameters())
        ours, theirs = (
            torch.cat([part[name].detach().flatten() for name in views]) for part in (views, parameters)
        )
        assert apart(ours, theirs) < 1e-5


def test_only_topologies_that_average_all_are_excused_from_equal_bits() -> None:
    assert {case.topology for case in FOURS if case.averages_all} == {"complete"}
    assert {case.topology for case in MOVING[:13]} == {case.topology for case in STAYING[:13]}


def test_gamma_sinks_below_one_in_part_of_every_run() -> None:
    gammas = [FOURS[0].plan().gamma(r) for r in range(UPDATES)]
    assert gammas[0] == 1.0
    assert 0 < min(gammas) < 0.5


def sent_rows(ranks: Ranks, plans: list[Plan]) -> list[int]:
    """Count the rows that this rank hands to torch to send in each case's run."""
    counts, real = [], dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> Any:
        counts[-1] += sum(operation.op is dist.isend for operation in operations)
        return real(operations)

    dist.batch_isend_irecv = counting
    for plan in plans:
        counts.append(0)
        train(ranks, plan, 0, 6)
    return counts


def test_ranks_send_each_row_that_crosses_them_and_no_other() -> None:
    cases = [case for case in FOURS if case.scheme == "atc" and case.topology in ("ring", "star", "base_k")]
    found = on_ranks(2, sent_rows, [case.plan() for case in cases])
    for index, case in enumerate(cases):
        topology = make_topology(case.topology, 4, case.k, 3)
        for rank in range(2):
            rows = [m for t in range(6) for m in messages(topology.peers(t), 2) if m.sender == rank]
            assert found[rank][index] == len(rows) > 0
