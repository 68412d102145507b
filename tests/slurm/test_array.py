"""Arrays in the queue of a real SLURM: divided, found again by the next launcher, cancelled. No job starts."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from settings import slurm_settings

from tiny_llm.config.compose import compose
from tiny_llm.config.errors import ConfigError
from tiny_llm.sweeps import slurm_queue
from tiny_llm.sweeps.array import Array
from tiny_llm.sweeps.points import Point, make_points
from tiny_llm.sweeps.sweep import Sweep

HELD = slurm_settings(cpus_per_task=1, additional_parameters={"hold": True}, array_parallelism=6)


@pytest.fixture
def points(
    cluster: Path, tmp_path: Path, tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Point]]:
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.setattr(slurm_queue, "longest_array", lambda: 2)
    composed = [compose([*tiny_overrides, f"runtime.seed={seed}"]) for seed in range(5)]
    sweep = Sweep(tmp_path / "s")
    made = make_points(composed, sweep.path, {})
    with sweep.locked():
        sweep.add_points(made)
    yield made
    jobs = [job for array in Sweep(sweep.path).arrays for job in array.jobs or []]
    subprocess.run(["scancel", *jobs], check=False)


def test_a_sweep_longer_than_an_array_becomes_several_that_share_the_limit(
    points: list[Point], tmp_path: Path
) -> None:
    array = Array(Sweep(tmp_path / "s"), HELD)
    array.submit(points, 0)
    assert [len(chunk.points) for chunk in array.sweep.arrays] == [2, 2, 1]
    assert {alive.label for alive in array.alive().values()} == {"waiting"}
    assert len(array.alive()) == 5
    scripts = [path.read_text() for path in sorted((tmp_path / "s" / ".submitit").glob("*/*_submission.sh"))]
    assert sum("#SBATCH --array=0-1%2\n" in script for script in scripts) == 2
    with pytest.raises(ConfigError, match="raise it to 3"):
        Array(array.sweep, dataclasses.replace(HELD, array_parallelism=2)).submit(points, 0)


def test_the_next_launcher_finds_jobs_whose_launcher_died_right_after_sbatch(
    points: list[Point], tmp_path: Path
) -> None:
    first = Array(Sweep(tmp_path / "s"), HELD)
    first.submit(points, 0)
    known = [array.jobs for array in first.sweep.arrays]
    for array in first.sweep.arrays:
        array.jobs = None
    first.sweep.arrays[1].token = "tiny_llm-never-submitted"
    first.sweep.write()

    second = Array(Sweep(tmp_path / "s"), HELD)
    found = second.in_flight(points)
    assert found == {points[0].name, points[1].name, points[4].name}
    assert [array.jobs for array in Sweep(tmp_path / "s").arrays] == [known[0], known[2]]
    subprocess.run(["scancel", *(known[1] or [])], check=True)


def test_cancelled_jobs_leave_the_queue(points: list[Point], tmp_path: Path) -> None:
    array = Array(Sweep(tmp_path / "s"), HELD)
    array.submit(points[:1], 0)
    assert set(array.alive()) == {points[0].name}
    array.abort()
    for _ in range(3):
        array.alive()
    assert not array.alive()
    assert "CANCELLED" in array.verdict(points[0].name)
