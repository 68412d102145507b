"""One run on several ranks of this machine: tokens/s, time in communication, and bytes on the wire.

`on_ranks` starts a function of a file on each of several ranks, as torchrun would, and returns what the first rank
found. Run as a module, this file is such a rank.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiny_llm.benchmarks.loading import load_file
from tiny_llm.config.errors import UserError

Result = dict[str, Any]


def on_ranks(file: str, function: str, ranks: int, *words: Any) -> Result:
    """Call a function of a file with `words`, plain data, on each of `ranks` processes. Raises UserError."""
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
        door = [sys.executable, "-m", "tiny_llm.benchmarks.processes"]
        command = [*door, file, function, str(result), json.dumps(words)]
        started = []
        for rank in range(ranks):
            own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            started.append(subprocess.Popen(command, env=os.environ | own))
        codes = [process.wait() for process in started]
        if any(codes):
            raise UserError(f"{function} ended with {codes} on {ranks} ranks")
        found: Result = json.loads(result.read_text())
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def training_on_ranks(name: str, overrides: list[str], windows: int, updates: int) -> Result:
    """Measure the production update on this and the other ranks."""
    from tiny_llm.benchmarks.machine import seconds_of
    from tiny_llm.benchmarks.measurements import repeat, spread
    from tiny_llm.benchmarks.workload import trainer_of
    from tiny_llm.config.compose import compose
    from tiny_llm.config.placement import find_placement
    from tiny_llm.config.plan import make_plan
    from tiny_llm.distributed.ranks import open_ranks
    from tiny_llm.training.device import prepare_torch

    placement = find_placement()
    plan = make_plan(compose(overrides).config(), placement.world)
    device = prepare_torch(plan.config, placement)
    with (
        open_ranks(placement, device, plan.config.runtime.timeout_seconds) as ranks,
        trainer_of(plan, ranks) as trainer,
    ):
        stream = trainer.open_stream()
        trainer.advance(stream)  # warm-up
        rates, talking, wire, first = [], [], [], trainer.update
        for _ in range(windows):
            ranks.words("")  # all begin together
            seconds_before, bytes_before = ranks.seconds_talking, sent_bytes()
            seconds = seconds_of(lambda: repeat(updates, lambda: trainer.advance(stream)), device)
            ranks.words("")  # all have sent
            rates.append(updates * plan.config.training.batch_tokens / seconds)
            talking.append((ranks.seconds_talking - seconds_before) / seconds)
            wire.append((sent_bytes() - bytes_before) / updates / placement.world)
        stream.close()
        engine = trainer.engine
        predicted = statistics.mean(engine.bytes_sent(number) for number in range(first, trainer.update))
        return {
            "name": name,
            "num_models": plan.num_models,
            "ranks": placement.world,
            "precision": trainer.config.runtime.precision,
            "tokens_per_second": spread(rates),
            "communication_share": spread(talking),
            "bytes_sent": spread(wire),
            "predicted_bytes_sent": predicted,
        }


def sent_bytes() -> int:
    """Return the bytes that all network interfaces of this machine have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def main() -> None:
    file, function, result, words = sys.argv[1:]
    found = getattr(load_file(Path(file)), function)(*json.loads(words))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
