"""Ways to train on several ranks of this machine: tokens/s, time in communication, and bytes on the wire.

`on_ranks` starts `training_on_ranks` on several ranks, as torchrun would, and returns what the first one found. Run
as a module, this file is such a rank.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_llm.benchmarks.loading import load_file
from tiny_llm.benchmarks.machine import seconds_of
from tiny_llm.benchmarks.measurements import spread
from tiny_llm.benchmarks.workload import trainer_of
from tiny_llm.config.compose import compose
from tiny_llm.config.errors import UserError
from tiny_llm.config.placement import find_placement
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.distributed.ranks import Ranks, open_ranks
from tiny_llm.training.device import prepare_torch

Result = dict[str, Any]


def on_ranks(ranks: int, ways: list[tuple[str, str, list[str]]], windows: int, updates: int) -> list[Result]:
    """Start `training_on_ranks` on each of `ranks` processes. Raises UserError."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
        "OMP_NUM_THREADS": threads,
    }
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "result.json"
        words = json.dumps([ways, windows, updates])
        command = [sys.executable, "-m", "tiny_llm.benchmarks.processes", str(result), words]
        started = []
        for rank in range(ranks):
            own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            started.append(subprocess.Popen(command, env=os.environ | own))
        codes = [process.wait() for process in started]
        if any(codes):
            raise UserError(f"the ranks of the benchmark ended with {codes}")
        found: list[Result] = json.loads(result.read_text())
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Way:
    """A way to train on several ranks, ready to go.

    update: does one. seconds_talking: spent in communication so far; None where it hides. predicted: the bytes that
    a rank sends in the next update; None where nobody says.
    """

    plan: Plan
    update: Callable[[], object]
    seconds_talking: Callable[[], float] | None = None
    predicted: Callable[[], float] | None = None


def training_on_ranks(ways: list[tuple[str, str, list[str]]], windows: int, updates: int) -> list[Result]:
    """Measure ways to train side by side on this and the other ranks.

    ways: each a name, the file whose `open_way` opens it, and overrides. They take turns, window by window, so that
    what slows the machine for a while slows all of them. Returns a result for each.
    """
    placement = find_placement()
    plan = make_plan(compose(ways[0][2]).config(), placement.world)
    device = prepare_torch(plan.config, placement)
    timeout = plan.config.runtime.timeout_seconds
    with open_ranks(placement, device, timeout) as ranks, ExitStack() as stack:
        opened = {
            name: stack.enter_context(load_file(Path(file)).open_way(overrides, ranks))
            for name, file, overrides in ways
        }
        found: list[list[Result]] = [[_window(way, ranks, updates) for way in opened.values()]]  # a warm-up
        found += [[_window(way, ranks, updates) for way in opened.values()] for _ in range(windows)]
        by_way = zip(opened.items(), zip(*found[1:], strict=True), strict=True)
        last = [window[-1]["rate"] for window in found[1:]] if len(ways) > 1 else []
        return [_summary(name, way, ranks.world, list(of_way), last) for (name, way), of_way in by_way]


def _window(way: Way, ranks: Ranks, updates: int) -> Result:
    """Do some updates; return tokens/s, CPU seconds, the share of time in communication, bytes sent and predicted."""
    talking, predicted = way.seconds_talking or (lambda: 0.0), []

    def work() -> None:
        for _ in range(updates):
            predicted.append(way.predicted() if way.predicted else 0.0)
            way.update()

    ranks.words("")  # all begin together
    seconds_before, bytes_before, worked = talking(), sent_bytes(), time.process_time()
    seconds = seconds_of(work, ranks.device)
    worked = time.process_time() - worked
    talked = talking() - seconds_before
    ranks.words("")  # all have sent
    return {
        "rate": updates * way.plan.config.training.batch_tokens / seconds,
        "cpu_seconds": worked / updates,
        "share": talked / seconds,
        "sent": (sent_bytes() - bytes_before) / updates / ranks.world,
        "predicted": statistics.mean(predicted),
    }


def _summary(name: str, way: Way, ranks: int, windows: list[Result], last: list[float]) -> Result:
    rates = [window["rate"] for window in windows]
    return {
        "name": name,
        "num_models": way.plan.num_models,
        "ranks": ranks,
        "precision": way.plan.config.runtime.precision,
        "tokens_per_second": spread(rates),
        "of_last": spread([rate / other for rate, other in zip(rates, last, strict=True)]) if last else None,
        "cpu_seconds": spread([w["cpu_seconds"] for w in windows]),
        "communication_share": spread([w["share"] for w in windows]) if way.seconds_talking else None,
        "bytes_sent": spread([w["sent"] for w in windows]),
        "predicted_bytes_sent": statistics.mean(w["predicted"] for w in windows) if way.predicted else None,
    }


@contextmanager
def open_way(overrides: list[str], ranks: Ranks) -> Iterator[Way]:
    """Open the production update."""
    plan = make_plan(compose(overrides).config(), ranks.world)
    with trainer_of(plan, ranks) as trainer, closing(trainer.open_stream()) as stream:
        yield Way(
            trainer.plan,
            lambda: trainer.advance(stream),
            lambda: ranks.seconds_talking,
            lambda: trainer.engine.bytes_sent(trainer.update),
        )


def sent_bytes() -> int:
    """Return the bytes that all network interfaces of this machine have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def main() -> None:
    result, words = sys.argv[1:]
    found = training_on_ranks(*json.loads(words))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
