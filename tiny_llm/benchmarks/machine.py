"""What this machine can do: its matmul peak and its copy bandwidth, the yardsticks of every benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

PEAK_SIZE = 4096
COPY_BYTES = 2**28
TRIES = 5


@dataclass(frozen=True)
class Machine:
    """matmul_flops: of a 4096^3 matmul, in FLOP/s. copy_bytes: read plus written, in bytes/s."""

    matmul_flops: float
    copy_bytes: float


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure in this process, with its threads, and take the best of a few tries."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    return Machine(
        matmul_flops=2 * PEAK_SIZE**3 / best_seconds(lambda: torch.mm(a, b, out=product), device),
        copy_bytes=2 * COPY_BYTES / best_seconds(lambda: target.copy_(source), device),
    )


def faster(first: Machine, second: Machine) -> Machine:
    """Return the better of two measurements, before and after: what else ran only ever slowed one down."""
    return Machine(max(first.matmul_flops, second.matmul_flops), max(first.copy_bytes, second.copy_bytes))


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    work()
    return min(seconds_of(work, device) for _ in range(TRIES))


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
