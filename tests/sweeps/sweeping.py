"""Sweeps of tiny runs, started as a user starts them, and looks at their processes and directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PATIENCE = 90.0
# A run of 208 updates, to be stopped on the way; each row is a chance to do so.
LONG = ["training.tokens_per_parameter=4", "training.epoch_tokens_per_parameter=2", "data.max_passes=50"]
LONG += ["training.log_every=3"]
FAILS = "1e30"  # a learning rate that is allowed, and too much for any run


class Launch:
    """One launcher process, whose output can be read while it runs."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._streams = [tempfile.TemporaryFile("w+b") for _ in range(2)]  # noqa: SIM115 - open as long as it
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._streams[0],
            stderr=self._streams[1],
        )

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    @property
    def code(self) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(PATIENCE)

    def _read(self, number: int) -> str:
        stream = self._streams[number]
        return os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0).decode()


class Launcher:
    """`python -m tiny_llm.train -m` in a folder of its own."""

    def __init__(self, folder: Path, overrides: list[str], **environment: str) -> None:
        self.folder, self.overrides = folder, overrides
        self.environment = os.environ | environment
        self._started: list[Launch] = []

    def start(self, *overrides: str, **environment: str) -> Launch:
        command = [sys.executable, "-m", "tiny_llm.train", "-m", *deduplicated(*self.overrides, *overrides)]
        self._started.append(Launch(command, self.folder, self.environment | environment))
        return self._started[-1]

    def run(self, *overrides: str, **environment: str) -> Launch:
        """Start a launch and wait for its end."""
        started = self.start(*overrides, **environment)
        started.process.wait(PATIENCE)
        return started

    def sweep(self, name: str) -> Path:
        return self.folder / "outputs" / "sweeps" / name

    def kill_all(self) -> None:
        for started in self._started:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()


def deduplicated(*overrides: str) -> list[str]:
    """Return all overrides, of those with the same key the last."""
    return list({text.partition("=")[0]: text for text in overrides}.values())


def wait_until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Return the first value of `true` that counts as true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := true():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def run_of(sweep: Path, *parts: str) -> Path:
    """Return the one run directory whose name has all `parts`."""
    (found,) = [path for path in sweep.iterdir() if {*parts} <= {*path.name.split("+")}]
    return found


def rows(run: Path, event: str = "train") -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in read if row["event"] == event]


def status(run: Path) -> str | None:
    path = run / "status.json"
    return json.loads(path.read_text())["status"] if path.exists() else None


def starts(run: Path) -> int:
    """Return how often a run was started or resumed."""
    return len(json.loads((run / "environment.json").read_text())["starts"])


def final_state(run: Path) -> dict[str, Any]:
    return torch.load(run / "final.pt", weights_only=True)


def assert_same_bits(run: Path, other: Path) -> None:
    ours, theirs = final_state(run), final_state(other)
    for key in ("parameters", "first_moment", "second_moment"):
        assert torch.equal(ours[key], theirs[key]), key
    losses = [[(row["update"], row["loss"]) for row in rows(one)] for one in (run, other)]
    assert losses[0] == losses[1]


def living_runs() -> Iterator[tuple[int, str, str]]:
    """Give process id, directory and CUDA_VISIBLE_DEVICES of every run of a pool on this machine."""
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "tiny_llm.sweeps.job" in words:
            devices = next((text for text in variables if text.startswith("CUDA_VISIBLE_DEVICES=")), "=")
            yield int(entry.name), words[words.index("tiny_llm.sweeps.job") + 1], devices.partition("=")[2]
