"""What this machine can do: its matmul peak and its copy bandwidth, the yardsticks of every benchmark.

Other work on the machine makes it slower for seconds or minutes, so it is measured around every window of a
measurement, and a window is compared with what the machine could do just before and after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

PEAK_SIZE = 4096
COPY_BYTES = 2**27
TRIES = 2


@dataclass(frozen=True)
class Machine:
    """matmul_flops: of a 4096^3 matmul, in FLOP/s. copy_bytes: read plus written, in bytes/s."""

    matmul_flops: float
    copy_bytes: float


@dataclass(frozen=True)
class Windows:
    """How long windows of work took, and the machine before, between and after them."""

    seconds: list[float]
    machines: list[Machine]

    def machine(self) -> Machine:
        """Return the median machine."""
        flops, copies = zip(*((m.matmul_flops, m.copy_bytes) for m in self.machines), strict=True)
        return Machine(statistics.median(flops), statistics.median(copies))

    def shares_of_peak(self, flops: float) -> list[float]:
        """Return the matmul peak's share that each window reached with `flops` model FLOPs."""
        peaks = [(before.matmul_flops + after.matmul_flops) / 2 for before, after in pairwise(self.machines)]
        return [flops / seconds / peak for seconds, peak in zip(self.seconds, peaks, strict=True)]

    def times_least(self, traffic: int) -> list[float]:
        """Return how many times as long each window took as copying does with `traffic` bytes."""
        copies = [(before.copy_bytes + after.copy_bytes) / 2 for before, after in pairwise(self.machines)]
        return [seconds * copy / traffic for seconds, copy in zip(self.seconds, copies, strict=True)]


class Yardstick:
    """Measures the machine in this process, with its threads, and takes the best of a few tries."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._a, self._b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=device).to(dtype) for _ in range(2))
        self._product = torch.empty_like(self._a)
        self._source = torch.zeros(COPY_BYTES // 4, device=device)
        self._target = torch.zeros_like(self._source)
        self.machine()  # a warm-up

    def machine(self) -> Machine:
        matmul = self._best_seconds(lambda: torch.mm(self._a, self._b, out=self._product))
        copy = self._best_seconds(lambda: self._target.copy_(self._source))
        return Machine(2 * PEAK_SIZE**3 / matmul, 2 * COPY_BYTES / copy)

    def _best_seconds(self, work: Callable[[], object]) -> float:
        return min(seconds_of(work, self.device) for _ in range(TRIES))


def measure_windows(
    work: Callable[[], object], windows: int, device: torch.device, dtype: torch.dtype
) -> Windows:
    """Time `work` in windows, and the machine around each."""
    yardstick = Yardstick(device, dtype)
    seconds, machines = [], [yardstick.machine()]
    for _ in range(windows):
        seconds.append(seconds_of(work, device))
        machines.append(yardstick.machine())
    return Windows(seconds, machines)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return how long `work` takes until the device has finished it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
