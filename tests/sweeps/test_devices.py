"""Devices and slots: which there are, who has them, when they are free again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from settings import local_settings

from tiny_llm.config.compose import compose
from tiny_llm.config.errors import ConfigError
from tiny_llm.sweeps.devices import listed_devices, take_lease, visible_devices
from tiny_llm.sweeps.points import Point, make_points
from tiny_llm.sweeps.pool import Slots, plan_slots


@pytest.mark.parametrize(
    ("inherited", "devices"),
    [
        ("3,1", ["3", "1"]),
        ("GPU-12ab, MIG-34cd", ["GPU-12ab", "MIG-34cd"]),
        ("0,-1,2", ["0"]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_inherited_devices_are_kept_as_they_are(inherited: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": inherited}) == devices


def test_a_divided_gpu_counts_as_its_parts() -> None:
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n"
        "  MIG 1g.18gb     Device  0: (UUID: MIG-b1)\n"
        "  MIG 1g.18gb     Device  1: (UUID: MIG-b2)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-cc)\n"
    )
    assert listed_devices(listing) == ["MIG-b1", "MIG-b2", "1"]


def test_a_lease_lasts_as_long_as_the_process_that_inherited_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lease = take_lease(["0", "1"])
    assert lease is not None
    assert lease.device == "0"
    run = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lease.file.fileno()]
    )
    lease.file.close()
    second = take_lease(["0", "1"])
    assert second is not None
    assert second.device == "1"
    assert take_lease(["0", "1"]) is None
    run.kill()
    run.communicate()
    freed = take_lease(["0", "1"])
    assert freed is not None
    assert freed.device == "0"


def point(*overrides: str) -> Point:
    return make_points([compose(["data=stdlib", *overrides])], Path("s"), {})[0]


@pytest.mark.parametrize(
    ("settings", "devices", "cores", "slots"),
    [
        ({}, ["0", "1"], 16, Slots(2, ("0", "1"), 4)),
        ({}, ["0", "1", "2", "3"], 8, Slots(4, ("0", "1", "2", "3"), 2)),
        ({"max_parallel": 1}, ["0", "1"], 16, Slots(1, ("0", "1"), 4)),
        ({}, [], 16, Slots(4, (), 4)),
        ({"threads_per_run": 1}, [], 2, Slots(2, (), 1)),
        ({"max_parallel": 8}, [], 4, Slots(8, (), 1)),
        ({}, [], 2, Slots(1, (), 2)),
    ],
)
def test_slots_fill_the_machine_and_no_more(
    settings: dict[str, int], devices: list[str], cores: int, slots: Slots
) -> None:
    assert plan_slots(local_settings(**settings), [point()], devices, cores) == slots


def test_runs_on_the_cpu_lease_no_gpu() -> None:
    slots = plan_slots(local_settings(threads_per_run=2), [point("runtime.device=cpu")], ["0"], 8)
    assert slots == Slots(4, (), 2)


def test_more_runs_than_devices_or_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_parallel=3: a device trains one run at a time"):
        plan_slots(local_settings(max_parallel=3), [point()], ["0", "1"], 8)
    with pytest.raises(ConfigError, match="threads=3: 4 runs at once on 8 cores leave 2"):
        plan_slots(local_settings(max_parallel=4), [point("runtime.threads=3")], [], 8)
