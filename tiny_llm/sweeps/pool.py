"""Runs on this machine: a pool of processes that never shares a device and never oversubscribes the cores.

Each run is a process of its own, led by `job.py`, with its device in CUDA_VISIBLE_DEVICES and its number of
threads in the environment. When the pool stops, its runs get SIGTERM, save and end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiny_llm.config.errors import ConfigError
from tiny_llm.config.schema import PositiveInt
from tiny_llm.sweeps.crew import Alive, LaunchSettings
from tiny_llm.sweeps.devices import take_lease, visible_devices
from tiny_llm.sweeps.points import Point
from tiny_llm.sweeps.states import is_held
from tiny_llm.sweeps.sweep import Sweep

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class LocalSettings(LaunchSettings):
    """hydra/launcher=local."""

    max_parallel: PositiveInt | None
    threads_per_run: PositiveInt


@dataclass(frozen=True)
class Slots:
    """How many runs there may be at once, on which devices (none: CPU) and with how many threads each."""

    count: int
    devices: tuple[str, ...]
    threads: int


def plan_slots(settings: LocalSettings, points: Sequence[Point], devices: Sequence[str], cores: int) -> Slots:
    """Divide this machine among the runs. Raises ConfigError for what does not fit on it."""
    if any(point.config.runtime.device == "cpu" for point in points):
        if any(point.config.runtime.device == "cuda" for point in points):
            raise ConfigError("runtime.device=cpu,cuda: one local sweep runs on one kind of device")
        devices = ()
    most = settings.max_parallel
    if devices and most and most > len(devices):
        raise ConfigError(
            f"hydra.launcher.max_parallel={most}: a device trains one run at a time, and "
            f"{len(devices)} are visible ({','.join(devices)})"
        )
    count = most or len(devices) or max(1, cores // settings.threads_per_run)
    threads = max(1, min(settings.threads_per_run, cores // count))
    for point in points:
        wanted = point.config.runtime.threads
        if wanted and wanted > threads:
            raise ConfigError(
                f"runtime.threads={wanted}: {count} runs at once on {cores} cores leave {threads} threads a run; "
                "lower it or hydra.launcher.max_parallel, or raise hydra.launcher.threads_per_run"
            )
    return Slots(count, tuple(devices), threads)


class Pool:
    """A crew of processes."""

    name = "local"
    longest_wait = 0.5

    def __init__(self, sweep: Sweep, settings: LocalSettings) -> None:
        self.sweep = sweep
        self.settings = settings
        self.slots = Slots(1, (), 1)
        self.waiting: deque[Point] = deque()
        self.running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        self.ends: dict[str, int] = {}
        self.held: set[str] = set()

    def check(self, points: Sequence[Point]) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.slots = plan_slots(self.settings, points, visible_devices(os.environ), cores)

    def rehearses(self, points: Sequence[Point]) -> bool:
        return False

    def in_flight(self, points: Sequence[Point]) -> set[str]:
        return set()  # runs end with their launcher; one that still saves is waited for in `advance`

    def submit(self, points: Sequence[Point], launch: int) -> None:
        self.sweep.entrust(points, launch)
        self.waiting.extend(points)

    def alive(self) -> Mapping[str, Alive]:
        for name, (process, _) in list(self.running.items()):
            if (code := process.poll()) is not None:
                self.ends[name] = code
                del self.running[name]
        waiting = {point.name: Alive("waiting") for point in self.waiting}
        elsewhere = {name: Alive("running", "in another process") for name in self.held & waiting.keys()}
        return (
            waiting | elsewhere | {name: Alive("running", place) for name, (_, place) in self.running.items()}
        )

    def advance(self) -> None:
        """Start what there is room for; a point that another process still trains waits for that one."""
        self.held = set()
        for _ in range(len(self.waiting)):
            if len(self.running) >= self.slots.count:
                break
            point = self.waiting.popleft()
            if is_held(point.directory):
                self.held.add(point.name)
                self.waiting.append(point)
            elif not self._start(point):
                self.waiting.appendleft(point)
                break

    def began(self, name: str) -> bool:
        return name in self.running or name in self.ends

    def abort(self) -> None:
        self.waiting.clear()
        self._signal(signal.SIGTERM)

    def leave(self) -> str:
        """Stop the runs and wait until they have saved; a second signal to the launcher kills them."""
        stopped = len(self.running)
        self.abort()
        try:
            while self.alive():
                time.sleep(0.05)
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        return f"{stopped} running {'run has' if stopped == 1 else 'runs have'} saved and ended"

    def log(self, name: str) -> Path:
        return self.sweep.jobs_folder / f"{name}.log"

    def verdict(self, name: str) -> str:
        code = self.ends.get(name)
        return f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else ""

    def _start(self, point: Point) -> bool:
        """Start a run, on a device of its own where there are any; False when all of them are busy."""
        lease = take_lease(self.slots.devices)
        if self.slots.devices and lease is None:
            return False
        command = [
            sys.executable,
            "-m",
            "tiny_llm.sweeps.job",
            str(point.directory),
            "--parent",
            str(os.getpid()),
        ]
        environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(self.slots.threads))
        environment["CUDA_VISIBLE_DEVICES"] = lease.device if lease else ""
        with open(self.log(point.name), "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[lease.file.fileno()] if lease else [],
                start_new_session=True,  # a Ctrl-C on the terminal is the launcher's to handle
            )
        if lease:
            lease.file.close()  # from here on the run alone holds the device
        place = f"GPU {lease.device}" if lease else f"{self.slots.threads} threads"
        self.running[point.name] = (process, f"{place}, pid {process.pid}")
        return True

    def _signal(self, number: int) -> None:
        for process, _ in self.running.values():
            process.send_signal(number)
