"""What an update of the engine promises beyond the oracle: executors, equalities, refusals, accumulation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from topology_reference import reference_matrix
from torch import Tensor

from tiny_llm.config.plan import Plan
from tiny_llm.config.schema import ConstantSchedule, WsdSchedule
from tiny_llm.decentralized.topology import TOPOLOGY_NAMES
from tiny_llm.models.decoder import loss_sums
from tiny_llm.packed import local_mean_losses
from tiny_llm.training.engine import Engine, NonFiniteError

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, batches, one_thread, random_state, small_config, small_plan  # noqa: F401

SCHEMES = ("awc", "atc")
EXECUTIONS = ("looped", "batched")
POWERS_OF_TWO_ONLY = ("hypercube", "one_peer_hypercube")
Batch = tuple[Tensor, Tensor]


def packed_plan(
    scheme: str,
    num_models: int,
    execution: str = "auto",
    topology: str = "one_peer_exponential",
    precision: str = "fp64",
    updates: int = 25,
    **sections: dict[str, Any],
) -> Plan:
    config = small_config(
        decentralized={"scheme": scheme, "num_models": num_models, "execution": execution},
        topology={"name": topology},
        runtime={"precision": precision},
        **sections,
    )
    return small_plan(config, updates)


def engine_of(plan: Plan, own_weights: bool = False) -> Engine:
    """A fresh engine; with `own_weights` every worker starts somewhere else."""
    engine = Engine(plan, torch.device("cpu"))
    if own_weights:
        for i in range(plan.num_models):
            row = engine.model.layout.views(engine.model.parameter_storage[i])
            for name, value in random_state(plan.config.model, i).items():
                row[name].copy_(value)
    return engine


def train(engine: Engine, data: list[Batch]) -> list[list[float]]:
    return [engine.update(r, lambda batch=batch: batch).losses for r, batch in enumerate(data)]


def arenas(engine: Engine) -> dict[str, Tensor]:
    return {
        "parameters": engine.model.parameter_storage,
        "gradients": engine.model.gradient_storage,
        "first moments": engine.optimizer.first_moment_storage,
        "second moments": engine.optimizer.second_moment_storage,
    }


# executors and equalities


@pytest.mark.parametrize(
    ("scheme", "topology"), [*product(SCHEMES, ("one_peer_exponential", "base_k", "ring"))]
)
def test_looped_and_batched_agree_to_1e_12_in_fp64(scheme: str, topology: str) -> None:
    engines = []
    for execution in EXECUTIONS:
        plan = packed_plan(
            scheme,
            5,
            execution,
            topology,
            updates=12,
            model={"layers": 2},
            adaptive_consensus={"enabled": True, "start_frac": 0.25, "p": 1.0},
        )
        engine = engine_of(plan)
        losses = train(engine, batches(plan, 12))
        engines.append((arenas(engine), losses))
    (looped, looped_losses), (batched, batched_losses) = engines
    assert np.allclose(looped_losses, batched_losses, rtol=1e-12, atol=0)
    for name, arena in looped.items():
        for i in range(5):
            assert apart(batched[name][i], arena[i]) < 1e-12, (name, i)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("topology", ["one_peer_exponential", "star"])
@pytest.mark.parametrize("execution", ["looped", "auto"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_worker_is_synchronous_training_bit_for_bit(
    scheme: str, execution: str, topology: str, precision: str
) -> None:
    """On a CPU `auto` loops; one worker mixes nothing even where gamma would weaken it."""
    off = packed_plan("off", 1, precision=precision, updates=6)
    one = packed_plan(
        scheme,
        1,
        execution,
        topology,
        precision,
        updates=6,
        adaptive_consensus={"enabled": True, "start_frac": 0.0, "p": 1.0},
    )
    data = batches(off, 6)
    engines = engine_of(off), engine_of(one)
    assert train(engines[0], data) == train(engines[1], data)
    for name, arena in arenas(engines[0]).items():
        assert torch.equal(arenas(engines[1])[name], arena), name


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("num_models", [2, 3, 4])
def test_complete_atc_on_identical_data_is_one_worker(num_models: int, execution: str) -> None:
    single, plan = packed_plan("off", 1), packed_plan("atc", num_models, execution, "complete")
    data = batches(single, 25)
    same = [tuple(part.repeat_interleave(num_models, 0) for part in batch) for batch in data]
    one, many = engine_of(single), engine_of(plan)
    expected, losses = train(one, data), train(many, same)  # type: ignore[arg-type]
    for (loss,), local in zip(expected, losses, strict=True):
        assert local == pytest.approx([loss] * num_models, rel=1e-11)
    for name, arena in arenas(one).items():
        for i in range(num_models):
            assert apart(arenas(many)[name][i], arena[0]) < 1e-11, (name, i)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("num_models", [2, 3, 4])
def test_worker_i_gets_rows_i_and_every_nth_after_it(num_models: int, execution: str) -> None:
    plan = packed_plan("awc", num_models, execution)
    ((tokens, targets),) = batches(plan, 1)
    for row in range(len(tokens)):
        only = torch.full_like(targets, -100)
        only[row] = targets[row]
        norms = engine_of(plan).update(0, lambda only=only: (tokens, only)).norms
        assert [i for i, norm in enumerate(norms) if norm > 0] == [row % num_models]


# mixing alone


def silent(plan: Plan) -> Batch:
    """A batch without a valid target: every gradient is zero."""
    shape = (plan.batch_sequences, plan.config.model.context_length)
    return torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)


@pytest.mark.parametrize(
    ("topology", "execution"), [*product(TOPOLOGY_NAMES, ("batched",)), ("one_peer_exponential", "looped")]
)
def test_without_gradient_and_decay_awc_and_atc_are_pure_mixing(topology: str, execution: str) -> None:
    """... and the mean over workers moves by no more than rounding."""
    n = 4 if topology in POWERS_OF_TWO_ONLY else 5
    engines = []
    for scheme in SCHEMES:
        plan = packed_plan(
            scheme,
            n,
            execution,
            topology,
            updates=9,
            optimizer={"weight_decay": 0.0},
            adaptive_consensus={"enabled": True, "start_frac": 0.5, "p": 1.0},
        )
        engines.append(engine_of(plan, own_weights=True))
    expected = engines[0].model.parameter_storage.numpy().copy()
    mean = expected.mean(0)
    for r in range(9):
        for engine in engines:
            result = engine.update(r, lambda: silent(plan))
            assert result.losses == result.norms == [0.0] * n
        strength = plan.gamma(r)
        w = strength * reference_matrix(topology, n, r) + (1 - strength) * np.eye(n)
        expected = w @ expected
    awc, atc = (engine.model.parameter_storage for engine in engines)
    assert torch.equal(awc, atc)
    assert apart(awc, torch.from_numpy(expected)) < 1e-14
    assert np.abs(awc.numpy().mean(0) - mean).max() < 9 * 2.3e-16 * np.abs(expected).max() * 4
    assert topology == "disconnected" or apart(awc, torch.from_numpy(mean).expand(n, -1)) < 1
    for engine in engines:
        assert not engine.optimizer.first_moment_storage.any()
        assert not engine.optimizer.second_moment_storage.any()


def test_with_decay_alone_awc_and_atc_mix_and_shrink_matrices() -> None:
    """With a zero gradient both orders give (1 - lr wd) W x on matrices and W x on norms."""
    for scheme in SCHEMES:
        plan = packed_plan(scheme, 4, topology="ring", optimizer={"weight_decay": 0.5, "lr": 0.1}, updates=5)
        plan = replace(plan, config=replace(plan.config, schedule=ConstantSchedule("constant", 0)))
        engine = engine_of(plan, own_weights=True)
        mixed = torch.from_numpy(reference_matrix("ring", 4, 0) @ engine.model.parameter_storage.numpy())
        engine.update(0, lambda plan=plan: silent(plan))
        for name, value in engine.model.layout.views(mixed).items():
            factor = 1 - 0.1 * 0.5 if value.dim() == 3 else 1.0
            assert apart(engine.model.packed()[name], value * factor) < 1e-13, name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_at_gamma_zero_nothing_is_mixed(scheme: str) -> None:
    """wsd ends at rate 0, where gamma = (0 / lr)^p: the last update changes no weight, though workers differ."""
    plan = packed_plan(
        scheme,
        4,
        topology="complete",
        updates=4,
        adaptive_consensus={"enabled": True, "start_frac": 0.5, "p": 1.0},
    )
    plan = replace(plan, config=replace(plan.config, schedule=WsdSchedule("wsd", 1, 0.5)))
    assert plan.gamma(3) == 0.0
    engine = engine_of(plan, own_weights=True)
    before = engine.model.parameter_storage.clone()
    ((tokens, targets),) = batches(plan, 1)
    engine.update(3, lambda: (tokens, targets))
    assert torch.equal(engine.model.parameter_storage, before)
    assert engine.optimizer.first_moment_storage.any(), "local moments go on"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_moments_are_never_mixed(scheme: str) -> None:
    """Worker 0 alone has a gradient; with complete mixing the others' moments stay zero all the same."""
    plan = packed_plan(scheme, 4, topology="complete")
    ((tokens, targets),) = batches(plan, 1)
    targets[[row for row in range(len(targets)) if row % 4]] = -100
    engine = engine_of(plan)
    for r in range(3):
        engine.update(r, lambda: (tokens, targets))
    for moments in (engine.optimizer.first_moment_storage, engine.optimizer.second_moment_storage):
        assert moments[0].any()
        assert not moments[1:].any()


# refusals


def plant_in_gradient(engine: Engine, worker: int, value: float) -> None:
    """The loss stays finite; one number of one worker's gradient does not."""
    name = "layers.0.mlp.down.weight"

    def spoil_row(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled[2, 3] = value
        return spoiled

    def spoil_packed(gradient: Tensor) -> Tensor:
        return torch.stack([spoil_row(g) if i == worker else g for i, g in enumerate(gradient)])

    engine.model.worker(worker)[name].register_hook(spoil_row)
    engine.model.packed()[name].register_hook(spoil_packed)


def plant_in_weights(engine: Engine, worker: int, value: float) -> None:
    """One weight, and with it the loss, of one worker."""
    engine.model.parameter_storage[worker, 5] = value


PLANTS: dict[str, tuple[Callable[[Engine, int, float], None], float]] = {
    "nan gradient": (plant_in_gradient, float("nan")),
    "infinite gradient": (plant_in_gradient, float("-inf")),
    "nan loss": (plant_in_weights, float("nan")),
    "infinite loss": (plant_in_weights, float("inf")),
}


@pytest.mark.parametrize("grad_clip", [None, 0.3])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("plant", "value"), PLANTS.values(), ids=PLANTS.keys())
def test_a_non_finite_worker_stops_the_update_before_anything_changes(
    plant: Callable[[Engine, int, float], None],
    value: float,
    scheme: str,
    execution: str,
    grad_clip: float | None,
) -> None:
    plan = packed_plan(scheme, 4, execution, optimizer={"grad_clip": grad_clip})
    data = batches(plan, 3)
    engine = engine_of(plan)
    train(engine, data[:2])
    plant(engine, 2, value)
    before = {name: arena.clone() for name, arena in arenas(engine).items()}
    with pytest.raises(NonFiniteError, match=r"update 3\b.*worker 2\b") as caught:
        engine.update(2, lambda: data[2])
    assert isinstance(caught.value, ValueError)
    for name in ("parameters", "first moments", "second moments"):
        torch.testing.assert_close(arenas(engine)[name], before[name], rtol=0, atol=0, equal_nan=True)
    assert engine.optimizer.updates == 2

    healthy = engine_of(plan)  # the gradient arena holds what the other workers' data gives, not clipped
    healthy.model.parameter_storage.copy_(before["parameters"])
    healthy.model.parameter_storage[2] = before["parameters"][1]
    recorded = raw_gradients(healthy, data[2])
    for i in (0, 1, 3):
        assert apart(engine.model.gradient_storage[i], recorded[i]) < 1e-12
    assert not engine.model.gradient_storage[2].isfinite().all()


def raw_gradients(engine: Engine, batch: Batch) -> Tensor:
    """Each worker's gradient on its rows, by a backward pass outside the engine."""
    tokens, targets = (
        torch.stack([part[i :: engine.plan.num_models] for i in range(engine.plan.num_models)])
        for part in batch
    )
    engine.model.zero_gradients_()
    local_mean_losses(engine.model, tokens, targets).sum().backward()  # type: ignore[no-untyped-call]
    return engine.model.gradient_storage


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_loss_alone_that_is_not_finite_is_refused(execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every gradient is finite all the same."""
    calls = []

    def spoiled(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        sums = loss_sums(*arguments, **options)
        if sums.dim():
            return sums + torch.tensor([0.0, torch.inf, 0.0])
        return sums + (torch.inf if len(calls) == 2 else 0.0)

    monkeypatch.setattr("tiny_llm.training.engine.loss_sums", spoiled)
    plan = packed_plan("awc", 3, execution)
    engine = engine_of(plan)
    before = engine.model.parameter_storage.clone()
    with pytest.raises(NonFiniteError, match=r"loss inf .*worker 1\b"):
        engine.update(0, lambda: batches(plan, 1)[0])
    assert torch.equal(engine.model.parameter_storage, before)
    assert engine.model.gradient_storage.isfinite().all()


def test_one_worker_that_is_not_finite_is_refused_too() -> None:
    plan = packed_plan("off", 1)
    engine = engine_of(plan)
    engine.model.parameter_storage[0, 5] = float("nan")
    with pytest.raises(NonFiniteError, match="update 1") as caught:
        engine.update(0, lambda: batches(plan, 1)[0])
    assert "worker" not in str(caught.value)


# accumulation


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("padding", ["none", "some", "a whole micro-batch"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_accumulated_micro_batches_equal_one_big_one(
    execution: str, padding: str, micro_batch_size: int, precision: str, tolerance: float
) -> None:
    config = small_config(
        decentralized={"execution": execution},
        runtime={"precision": precision},
        optimizer={"grad_clip": 0.5},
    )
    whole = small_plan(config, updates=3, rows=8, micro_batch_size=8)
    parts = small_plan(config, updates=3, rows=8, micro_batch_size=micro_batch_size)
    assert whole.accumulation == 1
    assert parts.accumulation == 8 // micro_batch_size
    one, several = engine_of(whole), engine_of(parts)
    generator = torch.Generator().manual_seed(1)
    for r in range(3):
        tokens, targets = torch.randint(257, (2, 8, 8), generator=generator)
        if padding != "none":
            targets[1, 1:] = targets[2, :4] = targets[7, ::2] = -100
        if padding == "a whole micro-batch":
            targets[4:] = -100
        micro_batches = zip(tokens.split(micro_batch_size), targets.split(micro_batch_size), strict=True)
        expected = one.update(r, lambda tokens=tokens, targets=targets: (tokens, targets))
        result = several.update(r, lambda micro_batches=micro_batches: next(micro_batches))
        assert next(micro_batches, None) is None, "every micro-batch was taken"
        assert result.losses == pytest.approx(expected.losses, rel=tolerance)
        assert result.norms == pytest.approx(expected.norms, rel=tolerance)
    for name, arena in arenas(one).items():
        assert apart(arenas(several)[name], arena) < tolerance, name
