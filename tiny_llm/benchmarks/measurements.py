"""The measurements, one function a kind. Each runs in a process of its own and returns plain numbers."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_llm.benchmarks.machine import Windows, measure_windows, seconds_of, synchronize
from tiny_llm.benchmarks.workload import flops_a_target, trainer_of
from tiny_llm.config.compose import compose
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models.decoder import head_weight, hidden_states
from tiny_llm.models.generation import Sampling, choose, generate_all
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.models.operations import linear
from tiny_llm.training.checkpoint import save_state
from tiny_llm.training.device import compute_dtype, prepare_torch, settle_runtime
from tiny_llm.training.loop import Trainer

Result = dict[str, Any]
SAMPLED = 256  # tokens of the sequences that sampling is measured on
GROWTH = 16  # of them sampled
SEQUENCES = (1, 4)


def spread(values: list[float]) -> Result:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def plan_of(overrides: list[str]) -> Plan:
    return make_plan(compose(overrides).config())


def training(name: str, overrides: list[str], windows: int, updates: int) -> Result:
    """Measure the production update: load, transfer, train, clip, mix, log.

    memory_over_arenas_bytes: what a first update takes beside parameters, gradients and moments, compilation
    included. It is taken before the yardsticks, whose memory is not the run's.
    """
    plan, resident = plan_of(overrides), resident_bytes()
    with trainer_of(plan) as trainer:
        config, device = trainer.config, trainer.device
        components = Components(trainer)
        stream = trainer.open_stream()
        trainer.advance(stream)  # warm-up: compilation, caches
        grown = trainer._peak_memory() - (resident if device.type == "cpu" else 0)
        components.reset()
        measured = measure_windows(
            lambda: repeat(updates, lambda: trainer.advance(stream)), windows, device, compute_dtype(config)
        )
        stream.close()
        return {
            **described(name, trainer.plan, measured, updates * config.training.batch_tokens),
            "execution": "looped" if trainer.engine.looped else "batched",
            "micro_batch_size": trainer.plan.micro_batch_size,
            "memory_over_arenas_bytes": grown - 4 * trainer.engine.model.parameter_storage.nbytes,
            "components": components.shares(),
        }


def described(name: str, plan: Plan, windows: Windows, tokens: int) -> Result:
    """Return what every training measurement tells, whoever trained: windows of `tokens` targets."""
    machine = windows.machine()
    rates = [tokens / seconds for seconds in windows.seconds]
    flops = flops_a_target(plan.config)
    return {
        "name": name,
        "num_models": plan.num_models,
        "precision": plan.config.runtime.precision,
        "compile": plan.config.runtime.compile,
        "threads": torch.get_num_threads(),
        "tokens_per_second": spread(rates),
        "model_flops_per_second": flops * statistics.median(rates),
        "share_of_matmul_peak": spread(windows.shares_of_peak(flops * tokens)),
        "matmul_peak_flops": machine.matmul_flops,
        "copy_bytes_per_second": machine.copy_bytes,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def resident_bytes() -> int:
    """Return the memory that this process holds now; where only its peak is known, that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
            ("mix and adamw", engine, "apply"),
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

        def work() -> None:
            norms = engine.model.gradient_norms()
            engine.apply(0, norms)

        work()
        measured = measure_windows(work, windows, trainer.device, compute_dtype(trainer.config))
        arena = engine.model.parameter_storage
        passes = 7 + (plan.num_models > 1)  # read g, p, m, v and the peer's p; write p, m, v
        return {
            "name": "clip + mix + AdamW",
            "num_models": plan.num_models,
            "seconds": spread(measured.seconds),
            "times_least": spread(measured.times_least(passes * arena.nbytes)),
            "copy_bytes_per_second": measured.machine().copy_bytes,
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
    """Measure evaluation against training, in turns, in targets a second."""
    with trainer_of(plan_of(overrides)) as trainer, closing(trainer.open_stream()) as stream:
        trainer.advance(stream)
        batch, device = trainer.config.training.batch_tokens, trainer.device
        weights = trainer.engine.model.average_state_dict()
        targets = trainer.evaluator.subset(weights).targets
        train, rates = [], []
        for _ in range(windows):
            train.append(batch / seconds_of(lambda: trainer.advance(stream), device))
            rates.append(targets / seconds_of(lambda: trainer.evaluator.subset(weights), device))
        return {
            "name": "evaluation",
            "tokens_per_second": spread(rates),
            "train_tokens_per_second": spread(train),
            "times_training": spread([rate / other for rate, other in zip(rates, train, strict=True)]),
        }


def sampling(overrides: list[str], windows: int) -> list[Result]:
    """Measure sampling at SAMPLED tokens, with the key-value cache and with the prefix read anew, in turns."""
    plan = plan_of(overrides)
    config = settle_runtime(plan)
    device = prepare_torch(config)
    weights = initial_parameters(config.model, config.runtime.seed)
    parameters = {name: value.to(device) for name, value in weights.items()}
    return [_sampling(config.model, parameters, sequences, windows) for sequences in SEQUENCES]


def _sampling(model: ModelConfig, parameters: dict[str, Tensor], sequences: int, windows: int) -> Result:
    """Let sequences grow by a few tokens to SAMPLED and take the median token of each window."""
    length = min(SAMPLED, model.context_length)
    prompts = torch.randint(model.vocab_size, (sequences, length - GROWTH)).tolist()
    rates = [
        [sequences / statistics.median(grow(model, parameters, prompts)) for grow in (cached, recomputed)]
        for _ in range(windows + 1)
    ][1:]  # the first is a warm-up
    fast, slow = (list(values) for values in zip(*rates, strict=True))
    return {
        "name": f"sampling {sequences} at once, at {length} tokens",
        "threads": torch.get_num_threads(),
        "cached_tokens_per_second": spread(fast),
        "recomputed_tokens_per_second": spread(slow),
        "times_recomputed": spread([one / other for one, other in rates]),
    }


def cached(model: ModelConfig, parameters: dict[str, Tensor], prompts: list[list[int]]) -> list[float]:
    """Sample as the product does; return the seconds of each token after the first, which reads the prompts."""
    seeds = list(range(len(prompts)))
    tokens = generate_all(model, parameters, prompts, GROWTH, Sampling(), seeds, None)
    marks = [time.perf_counter() for row, _ in tokens if row == len(prompts) - 1]
    return [end - start for start, end in pairwise(marks)]


@torch.no_grad()
def recomputed(model: ModelConfig, parameters: dict[str, Tensor], prompts: list[list[int]]) -> list[float]:
    """Do the same, reading all sequences anew for every token."""
    head = head_weight(parameters)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    tokens_RT, marks = torch.tensor(prompts, device=head.device), []
    for _ in range(GROWTH):
        hidden_RTD = hidden_states(model, parameters, tokens_RT, head.dtype)
        logits_RV = linear(hidden_RTD[:, -1], head).float().cpu()
        new = [
            [choose(logits_V, Sampling(), own)] for logits_V, own in zip(logits_RV, generators, strict=True)
        ]
        tokens_RT = torch.cat([tokens_RT, torch.tensor(new, device=head.device)], 1)
        marks.append(time.perf_counter())
    return [end - start for start, end in pairwise(marks)]


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
