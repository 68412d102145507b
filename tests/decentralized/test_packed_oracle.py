"""The packed run is N single models trained by hand, after 25 updates: see reference/training.py."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny_llm.config.plan import Plan
from tiny_llm.config.schema import ConstantSchedule, CosineSchedule, Schedule, WsdSchedule
from tiny_llm.decentralized.topology import TOPOLOGY_NAMES
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.engine import Engine, UpdateResult

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, batches, one_thread, small_config, small_plan  # noqa: F401
from reference.training import HandTrainedWorkers, gamma

UPDATES = 25
SIZES = (1, 2, 3, 4, 5, 8)
SCHEMES = ("awc", "atc")
POWERS_OF_TWO_ONLY = ("hypercube", "one_peer_hypercube")
SCHEDULES: tuple[Schedule, ...] = (
    CosineSchedule("cosine", warmup_steps=4, min_lr_ratio=0.1),
    WsdSchedule("wsd", warmup_steps=4, decay_fraction=0.4),
    CosineSchedule("cosine", warmup_steps=4, min_lr_ratio=0.0),
    ConstantSchedule("constant", warmup_steps=10),
)
SWITCHES: list[dict[str, bool | str]] = [
    {"gamma": gamma, "clip": clip, "execution": execution, "resumes": resumes}
    for gamma, clip, execution, resumes in product(
        (False, True), (False, True), ("looped", "batched"), (False, True)
    )
]


@dataclass(frozen=True)
class Case:
    """One run. `resume_at`: after how many updates its state moves into a fresh engine; 0: never."""

    scheme: str
    topology: str
    num_models: int
    gamma: bool
    clip: bool
    execution: str
    resume_at: int
    schedule: Schedule
    mix_every: int = 1
    k: int = 1
    precision: str = "fp64"

    def __str__(self) -> str:
        marks = [
            self.precision,
            self.scheme,
            f"{self.topology}{self.k if self.topology == 'base_k' else ''}",
            f"N{self.num_models}",
            self.execution,
            self.schedule.name,
            "gamma" if self.gamma else "",
            "clip" if self.clip else "",
            f"resume{self.resume_at}" if self.resume_at else "",
            f"every{self.mix_every}" if self.mix_every > 1 else "",
        ]
        return "-".join(mark for mark in marks if mark)

    def plan(self) -> Plan:
        start_frac, p = ((0.0, 0.5), (0.3, 2.0), (0.21, 1.0))[self.num_models % 3]
        config = small_config(
            decentralized={
                "scheme": self.scheme,
                "num_models": self.num_models,
                "execution": self.execution,
                "mix_every": self.mix_every,
            },
            topology={"name": self.topology, "k": self.k, "seed": 3},
            adaptive_consensus={"enabled": True, "start_frac": start_frac, "p": p} if self.gamma else {},
            optimizer={"grad_clip": 0.3 if self.clip else None},
            runtime={"precision": self.precision},
        )
        return small_plan(replace(config, schedule=self.schedule), UPDATES)


def allowed(topology: str, num_models: int) -> bool:
    return topology not in POWERS_OF_TWO_ONLY or num_models & (num_models - 1) == 0


def rotated(runs: list[tuple[str, str, int]], precision: str, seed: int) -> list[Case]:
    """Give each run its switches, so that each scheme meets each of their 16 combinations equally often.

    From 4 workers on every second `looped` becomes `batched`, which takes a third of the time.
    """
    shuffle = random.Random(seed)
    hands: dict[str, list[dict[str, bool | str]]] = {scheme: [] for scheme in SCHEMES}
    loops: Counter[int] = Counter()
    cases = []
    for place, (scheme, topology, num_models) in enumerate(runs):
        if not hands[scheme]:
            hands[scheme] = shuffle.sample(SWITCHES, len(SWITCHES))
        switches = dict(hands[scheme].pop())
        if switches["execution"] == "looped":
            loops[num_models] += 1
            if num_models >= 4 and loops[num_models] % 2:
                switches["execution"] = "batched"
        resume_at = shuffle.randrange(5, UPDATES - 4) if switches.pop("resumes") else 0
        cases.append(
            Case(
                scheme,
                topology,
                num_models,
                **switches,  # type: ignore[arg-type]
                resume_at=resume_at,
                schedule=SCHEDULES[place % len(SCHEDULES)],
                precision=precision,
            )
        )
    return cases


FP64 = rotated(
    [run for run in product(SCHEMES, TOPOLOGY_NAMES, SIZES) if allowed(run[1], run[2])], "fp64", seed=1
)
FP32 = rotated(
    [
        *product(SCHEMES, ("one_peer_exponential", "base_k"), (1, 3, 4)),
        *product(SCHEMES, ("equidyn", "star"), (5,)),
        *product(SCHEMES, ("complete",), (8,)),
    ],
    "fp32",
    seed=2,
)
MIX_EVERY = [
    replace(case, mix_every=mix_every)
    for case in rotated(
        list(product(SCHEMES, ("one_peer_exponential", "base_k", "random_matching"), (4,))), "fp64", seed=3
    )
    for mix_every in (2, 3)
]
DEGREE_TWO = [
    replace(case, k=2) for case in rotated(list(product(SCHEMES, ("base_k",), (5, 8))), "fp64", seed=4)
]


def test_the_runs_below_meet_every_switch() -> None:
    for case_switches in product(SCHEMES, (False, True), (False, True), ("looped", "batched"), (False, True)):
        assert case_switches in {
            (case.scheme, case.gamma, case.clip, case.execution, case.resume_at > 0)
            for case in FP64
            if case.num_models > 1
        }
    for size, execution, on in product(SIZES, ("looped", "batched"), (False, True)):
        assert any(case.num_models == size and case.execution == execution for case in FP64)
        assert any(case.num_models == size and case.gamma == on for case in FP64)
        assert any(case.num_models == size and case.clip == on for case in FP64)
    for topology, on in product(TOPOLOGY_NAMES, (False, True)):
        assert any(case.topology == topology and case.gamma == on for case in FP64 if case.num_models > 2)


@pytest.mark.parametrize("case", FP64, ids=str)
def test_in_fp64_the_packed_run_equals_hand_trained_models_to_1e_10(case: Case) -> None:
    compare(case, 1e-10)


@pytest.mark.parametrize("case", [*MIX_EVERY, *DEGREE_TWO], ids=str)
def test_mixing_now_and_then_and_base_k_of_degree_two_equal_hand_trained_models(case: Case) -> None:
    compare(case, 1e-10)


@pytest.mark.parametrize("case", FP32, ids=str)
def test_in_fp32_the_packed_run_equals_hand_trained_models_to_1e_5(case: Case) -> None:
    compare(case, 1e-5)


def compare(case: Case, tolerance: float) -> None:
    plan = case.plan()
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    initial = initial_parameters(plan.config.model, plan.config.runtime.seed)
    data = batches(plan, UPDATES, seed=case.num_models)
    hand = HandTrainedWorkers(plan.config, UPDATES, initial, dtype)
    expected = [hand.update(r, *batch) for r, batch in enumerate(data)]
    engine, results = packed_run(plan, data, case.resume_at)

    measured = [(result.losses, result.norms) for result in results]
    np.testing.assert_allclose(measured, expected, rtol=tolerance, atol=0)
    for i, (model, optimizer) in enumerate(zip(hand.models, hand.optimizers, strict=True)):
        parameters = dict(model.named_parameters())
        states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
        for arena, by_hand in (
            (engine.model.parameter_storage, parameters),
            (engine.optimizer.first_moment_storage, {n: state["exp_avg"] for n, state in states.items()}),
            (engine.optimizer.second_moment_storage, {n: state["exp_avg_sq"] for n, state in states.items()}),
        ):
            assert_near(engine.model.layout.views(arena[i]), by_hand, tolerance)
    assert_the_case_is_what_it_says(case, plan, hand)


def assert_near(views: Mapping[str, Tensor], by_hand: Mapping[str, Tensor], tolerance: float) -> None:
    """A worker's row as one vector, and in fp64 each parameter. In fp32 some start so small that they alone
    differ by a little more: AdamW divides gradients by their own rounding errors."""
    assert (
        apart(*(torch.cat([part[name].flatten() for name in views]) for part in (views, by_hand))) < tolerance
    )
    for name, view in views.items():
        assert apart(view, by_hand[name]) < (tolerance if view.dtype == torch.float64 else 10 * tolerance), (
            name
        )


def assert_the_case_is_what_it_says(case: Case, plan: Plan, hand: HandTrainedWorkers) -> None:
    assert hand.mixed == (UPDATES // case.mix_every if case.num_models > 1 else 0)
    assert (hand.clipped > 0) == case.clip
    gammas = [gamma(plan.config, r, UPDATES) for r in range(UPDATES)]
    assert (min(gammas) < 0.95) == case.gamma


def packed_run(
    plan: Plan, data: list[tuple[Tensor, Tensor]], resume_at: int
) -> tuple[Engine, list[UpdateResult]]:
    engine, results = Engine(plan, torch.device("cpu")), []
    for r, batch in enumerate(data):
        if r == resume_at:
            engine = moved(engine)
        results.append(engine.update(r, lambda batch=batch: batch))
    return engine, results


def moved(engine: Engine) -> Engine:
    """A fresh engine with the state of another, as `Trainer.restore` makes it."""
    fresh = Engine(engine.plan, engine.device)
    for arena, saved in (
        (fresh.model.parameter_storage, engine.model.parameter_storage),
        (fresh.optimizer.first_moment_storage, engine.optimizer.first_moment_storage),
        (fresh.optimizer.second_moment_storage, engine.optimizer.second_moment_storage),
    ):
        arena.copy_(saved)
    fresh.optimizer.updates = engine.optimizer.updates
    return fresh
