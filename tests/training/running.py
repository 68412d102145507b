"""Starts training as its door does, in this process or in one that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from tiny_llm.config.compose import compose, user_errors_in_one_line

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tiny_llm.training.start", "tiny_llm.train"])

STATE = ("parameters", "first_moment", "second_moment")


def train(*overrides: str) -> None:
    """Run the train door's task in this process."""
    from tiny_llm.train import train as task

    task(compose(list(overrides)))


def _train_quietly(overrides: tuple[str, ...]) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    with user_errors_in_one_line():
        train(*overrides)


def start(*overrides: str) -> multiprocessing.process.BaseProcess:
    """Run the train door's task in a process of its own, started in milliseconds."""
    process = _SERVER.Process(target=_train_quietly, args=(overrides,))
    process.start()
    return process


def send_at_row(
    process: multiprocessing.process.BaseProcess, run: Path, rows: int, number: signal.Signals
) -> int:
    """Send a signal once the run has written `rows` rows; return the exit code."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.is_alive() and len(rows_of(run)) < rows:
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def wait_until_running(process: multiprocessing.process.BaseProcess, run: Path) -> None:
    """Wait until the run in `run` is that of `process`, or the process has ended."""
    status = run / "status.json"
    while process.is_alive():
        if status.exists() and json.loads(status.read_text())["pid"] == process.pid:
            return
        time.sleep(0.005)


def rows_of(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def numbers_of(run: Path) -> list[Any]:
    """Return what must be the same in every repetition of a run: its rows without clocks and memory."""
    clocks = ("tokens_per_second", "seconds", "data_seconds", "memory_bytes")
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows_of(run)]


def status_of(run: Path) -> str:
    return str(json.loads((run / "status.json").read_text())["status"])


def assert_same_run(run: Path, other: Path) -> None:
    """Final weights, moments and rows are equal to the last bit."""
    state, expected = (torch.load(path / "final.pt", weights_only=True) for path in (run, other))
    for arena in STATE:
        assert torch.equal(state[arena], expected[arena]), arena
    assert numbers_of(run) == numbers_of(other)
    assert state["position"] == expected["position"]
    assert json.loads((run / "best.json").read_text()) == json.loads((other / "best.json").read_text())
