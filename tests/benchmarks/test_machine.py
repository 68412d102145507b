"""A window is compared with the machine just before and just after it."""

from __future__ import annotations

import pytest
import torch

from tiny_llm.benchmarks import machine
from tiny_llm.benchmarks.machine import Machine, Windows, measure_windows

SLOWING_DOWN = Windows([1.0, 2.0], [Machine(300.0, 60.0), Machine(100.0, 20.0), Machine(100.0, 20.0)])


def test_a_window_s_share_is_of_the_peak_around_it() -> None:
    assert SLOWING_DOWN.shares_of_peak(100.0) == pytest.approx([100 / 1 / 200, 100 / 2 / 100])


def test_a_window_s_traffic_is_compared_with_copying_around_it() -> None:
    assert SLOWING_DOWN.times_least(10) == pytest.approx([1.0 / (10 / 40), 2.0 / (10 / 20)])


def test_the_machine_of_all_windows_is_the_median_one() -> None:
    assert SLOWING_DOWN.machine() == Machine(100.0, 20.0)


def test_the_machine_is_measured_before_between_and_after_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PEAK_SIZE", 16)
    monkeypatch.setattr(machine, "COPY_BYTES", 4096)
    monkeypatch.setattr(machine, "TRIES", 1)
    done = []
    real = machine.Yardstick.machine
    monkeypatch.setattr(machine.Yardstick, "machine", lambda self: done.append("machine") or real(self))
    windows = measure_windows(lambda: done.append("work"), 2, torch.device("cpu"), torch.float32)
    assert done == ["machine", "machine", "work", "machine", "work", "machine"]  # the first is a warm-up
    assert len(windows.seconds) == 2
    assert all(m.matmul_flops > 0 and m.copy_bytes > 0 for m in windows.machines)
