"""The measurements, one function a kind. Each runs in a process of its own and returns plain numbers."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tiny_llm.benchmarks.machine import Machine, faster, measure_machine, seconds_of, synchronize
from tiny_llm.benchmarks.workload import flops_a_target, trainer_of
from tiny_llm.config.compose import compose
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.training.checkpoint import save_state
from tiny_llm.training.device import compute_dtype
from tiny_llm.training.loop import Trainer

Result = dict[str, Any]


def spread(values: list[float]) -> Result:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def plan_of(overrides: list[str]) -> Plan:
    return make_plan(compose(overrides).config())


def training(name: str, overrides: list[str], windows: int, updates: int) -> Result:
    """Measure the production update: load, transfer, train, clip, mix, log."""
    with trainer_of(plan_of(overrides)) as trainer:
        config, device = trainer.config, trainer.device
        before = measure_machine(device, compute_dtype(config))
        components = Components(trainer)
        stream = trainer.open_stream()
        trainer.advance(stream)  # warm-up: compilation, caches
        components.reset()
        rates = []
        for _ in range(windows):
            seconds = seconds_of(lambda: repeat(updates, lambda: trainer.advance(stream)), device)
            rates.append(updates * config.training.batch_tokens / seconds)
        stream.close()
        machine = faster(before, measure_machine(device, compute_dtype(config)))
        return {
            **described(name, trainer.plan, machine, rates),
            "execution": "looped" if trainer.engine.looped else "batched",
            "components": components.shares(),
        }


def described(name: str, plan: Plan, machine: Machine, rates: list[float]) -> Result:
    """Return what every training measurement tells, whoever trained."""
    flops = flops_a_target(plan.config) * statistics.median(rates)
    return {
        "name": name,
        "num_models": plan.num_models,
        "precision": plan.config.runtime.precision,
        "compile": plan.config.runtime.compile,
        "threads": torch.get_num_threads(),
        "tokens_per_second": spread(rates),
        "model_flops_per_second": flops,
        "share_of_matmul_peak": flops / machine.matmul_flops,
        "matmul_peak_flops": machine.matmul_flops,
        "copy_bytes_per_second": machine.copy_bytes,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def repeat(times: int, work: Callable[[], object]) -> None:
    for _ in range(times):
        work()


class Components:
    """Times the parts of an update by wrapping the trainer's own methods."""

    def __init__(self, trainer: Trainer) -> None:
        engine = trainer.engine
        self.device = trainer.device
        self.seconds: dict[str, float] = {}
        for name, owner, method in (
            ("data", trainer, "_next_micro_batch"),
            ("compute", engine, "_accumulate_gradients"),
            ("clip", engine.model, "gradient_norms"),
            ("mix", engine, "_mix"),
            ("adamw", engine.optimizer, "step"),
            ("log", trainer, "_log_train_row"),
        ):
            self._wrap(name, owner, method)

    def _wrap(self, name: str, owner: object, method: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            synchronize(self.device)
            start = time.perf_counter()
            result = inner(*arguments)
            synchronize(self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        object.__setattr__(owner, method, timed)

    def reset(self) -> None:
        self.seconds = {}

    def shares(self) -> dict[str, float]:
        """Return each part's share of the time; the data that compute waited for counts as data alone."""
        seconds = dict(self.seconds)
        seconds["compute"] = seconds.get("compute", 0.0) - seconds.get("data", 0.0)
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()}


def update(overrides: list[str], windows: int) -> Result:
    """Measure clip, mix and AdamW against the time that their least memory traffic takes."""
    with trainer_of(plan_of(overrides)) as trainer:
        engine, plan = trainer.engine, trainer.plan
        engine.model.gradient_storage.normal_()
        machine = measure_machine(trainer.device, compute_dtype(trainer.config))

        def work() -> None:
            norms = engine.model.gradient_norms()
            engine.apply(0, norms)

        work()
        seconds = [seconds_of(work, trainer.device) for _ in range(windows)]
        arena = engine.model.parameter_storage
        passes = 7 + (plan.num_models > 1)  # read g, p, m, v and the peer's p; write p, m, v
        least = passes * arena.nbytes / machine.copy_bytes
        return {
            "name": "clip + mix + AdamW",
            "num_models": plan.num_models,
            "seconds": spread(seconds),
            "least_traffic_seconds": least,
            "times_least": statistics.median(seconds) / least,
            "copy_bytes_per_second": machine.copy_bytes,
        }


def loading(overrides: list[str], windows: int) -> Result:
    """Measure what an update spends on data, logging and, spread over an epoch, checkpoints."""
    with trainer_of(plan_of(overrides)) as trainer, tempfile.TemporaryDirectory() as place:
        stream = trainer.open_stream()
        trainer.advance(stream)
        total = [seconds_of(lambda: trainer.advance(stream), trainer.device) for _ in range(windows)]
        rows = trainer.plan.accumulation

        def load() -> None:
            for _ in range(rows):
                trainer._next_micro_batch(stream)

        data = [seconds_of(load, trainer.device) for _ in range(windows)]
        result = trainer.engine.update(trainer.update, lambda: trainer._next_micro_batch(stream))
        trainer.window.add(result.losses)
        log = seconds_of(lambda: trainer._log_train_row(result), trainer.device)
        path = Path(place) / "state.pt"
        checkpoint = seconds_of(lambda: save_state(path, trainer.state() or {}), trainer.device)
        stream.close()
        median = statistics.median(total)
        epoch = trainer.plan.epoch_boundaries[0]
        return {
            "name": "data, logging, checkpoints",
            "update_seconds": median,
            "data_share": statistics.median(data) / median,
            "log_share": log / trainer.config.training.log_every / median,
            "checkpoint_seconds": checkpoint,
            "checkpoint_share": checkpoint / epoch / median,
        }


def evaluating(overrides: list[str], windows: int) -> Result:
    """Measure evaluation against training, in targets a second."""
    with trainer_of(plan_of(overrides)) as trainer:
        stream = trainer.open_stream()
        trainer.advance(stream)
        batch = trainer.config.training.batch_tokens
        train = [batch / seconds_of(lambda: trainer.advance(stream), trainer.device) for _ in range(windows)]
        stream.close()
        weights = trainer.engine.model.average_state_dict()
        targets = trainer.evaluator.subset(weights).targets
        rates = [
            targets / seconds_of(lambda: trainer.evaluator.subset(weights), trainer.device)
            for _ in range(windows)
        ]
        return {
            "name": "evaluation",
            "tokens_per_second": spread(rates),
            "train_tokens_per_second": spread(train),
            "times_training": statistics.median(rates) / statistics.median(train),
        }


def starting(overrides: list[str], windows: int) -> Result:
    """Measure the wall time of --help and of dry_run=true."""

    def seconds(*words: str) -> list[float]:
        command = [sys.executable, "-m", "tiny_llm.train", *words]
        run: Callable[[], object] = lambda: subprocess.run(command, capture_output=True, check=True)  # noqa: E731
        return [seconds_of(run, torch.device("cpu")) for _ in range(windows)]

    return {
        "name": "start-up",
        "help_seconds": spread(seconds("--help")),
        "dry_run_seconds": spread(seconds(*overrides, "dry_run=true")),
    }
