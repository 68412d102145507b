"""Sweeps on this machine, with real training processes: what runs at once, and what survives which end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from sweeping import (
    FAILS,
    LONG,
    Launcher,
    assert_same_bits,
    deduplicated,
    living_runs,
    rows,
    run_of,
    starts,
    status,
    wait_until,
)

from tiny_llm.config.compose import compose
from tiny_llm.train import train


def ours(launcher: Launcher) -> list[tuple[int, str, str]]:
    """Return the living runs of this test's launcher, each once: a run that forks looks like two for a moment."""
    folder = str(launcher.folder.resolve())
    runs = [run for run in living_runs() if os.path.realpath(f"/proc/{run[0]}/cwd") == folder]
    return list({directory: (pid, directory, device) for pid, directory, device in reversed(runs)}.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: list[str]) -> Path:
    """A run like those of the sweeps that nobody stopped."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    overrides = [*tiny_overrides, *LONG, "runtime.seed=1", f"output_dir={directory}"]
    train(compose(deduplicated(*overrides)))
    return directory


def test_a_sweep_leases_devices_lists_failures_and_goes_on_with_what_is_left(launcher: Launcher) -> None:
    pretend = {"CUDA_VISIBLE_DEVICES": "7,GPU-1a2b"}
    launcher.overrides.append(f"data.cache_dir={launcher.folder}/cache")
    auto = ["runtime.device=auto", "hydra.launcher.max_parallel=null"]
    launched = launcher.start(f"optimizer.lr=0.004,{FAILS}", "runtime.seed=1,2", *auto, **pretend)
    at_once, devices_seen = 0, set()
    while launched.process.poll() is None:
        living = ours(launcher)
        devices = [device for _, _, device in living]
        assert max(Counter(devices).values(), default=0) <= 1, f"a device is shared: {living}"
        at_once, devices_seen = max(at_once, len(living)), devices_seen | set(devices)
        time.sleep(0.02)
    assert (at_once, devices_seen) == (2, {"7", "GPU-1a2b"})

    assert launched.code == 1, launched.err
    assert "2 done, 2 failed" in launched.out
    directory = launcher.sweep("s")
    assert launched.out.count("prepare: wrote") == 1, "the launcher prepares the cache"
    assert not [log for log in directory.glob(".submitit/*.log") if "prepare:" in log.read_text()]
    for seed in (1, 2):
        failed = next(path for path in directory.glob(f"lr-1e30+seed-{seed}+*"))
        told = launched.err.partition(f"failed: {failed.name}\n")[2].partition("\n\n")[0]
        assert f"optimizer.lr=1e+30 runtime.seed={seed}" in told
        assert "error: update 2: " in told
        assert f"directory  outputs/sweeps/s/{failed.name}" in told

    before = {path: path.stat().st_mtime_ns for path in directory.glob("*/result.json")}
    grown = [f"optimizer.lr=0.004,{FAILS},0.003", "runtime.seed=1"]
    again = launcher.run(*grown)
    assert "3 points, 1 done, 0 still in the queue, 1 to start, 1 failed before" in again.out
    assert (again.code, "2 done, 1 failed" in again.out) == (1, True)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a complete point was touched"

    assert launcher.run(*grown, "hydra.launcher.retry_failed=true").code == 1
    retried = run_of(directory, "lr-1e30", "seed-1")
    assert starts(retried) == 2
    assert (retried / "metrics-lost-1.jsonl").exists(), "the rows of the first attempt are kept"
    saved = json.loads((directory / "sweep.json").read_text())
    assert sorted(saved["points"]) == sorted(path.name for path in directory.glob("*+*"))
    assert len(saved["launches"]) == 3
    assert saved["launches"][0]["source"].keys() == {"commit", "dirty", "diff"}


def test_runs_save_when_their_launcher_is_stopped_and_the_same_command_goes_on(
    launcher: Launcher, whole: Path
) -> None:
    points = [*LONG, "runtime.seed=1,2"]
    launched = launcher.start(*points)
    directory = launcher.sweep("s")
    wait_until(lambda: any(rows(run) for run in directory.glob("seed-1+*")), "a run trains")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.code == 128 + signal.SIGTERM
    assert "have saved and ended" in launched.err
    assert not ours(launcher), "no run outlives its launcher"
    stopped = run_of(directory, "seed-1")
    assert status(stopped) == "interrupted"

    second = launcher.run(*points)
    assert (second.code, "2 done" in second.out) == (0, True), second.err
    assert_same_bits(stopped, whole)
    assert starts(stopped) == 2
    assert "(resumed at update" in (stopped / "run.log").read_text()
    assert len(rows(stopped)) == len({row["update"] for row in rows(stopped)}), "an update is told twice"


def test_runs_save_when_their_launcher_is_killed_and_two_launchers_are_kept_apart(
    launcher: Launcher, whole: Path
) -> None:
    launched = launcher.start(*LONG, "runtime.seed=1")
    directory = launcher.sweep("s")
    wait_until(lambda: list(directory.glob("seed-1+*")) or list(directory.glob("*+*")), "it has started")
    busy = launcher.run(*LONG, "runtime.seed=1")
    assert busy.code == 2
    assert "another launcher works on outputs/sweeps/s" in busy.err
    (run,) = directory.glob("*+*")
    wait_until(lambda: rows(run), "the run trains")
    launched.process.kill()
    second = launcher.run(*LONG, "runtime.seed=1")  # at once: the run may still be saving
    assert second.code == 0, second.out + second.err
    assert starts(run) == 2, "the run outlived its launcher"
    assert_same_bits(run, whole)


def test_a_run_that_died_before_it_saved_starts_again_in_its_directory(launcher: Launcher) -> None:
    launched = launcher.start(*LONG, "runtime.seed=1")
    run = wait_until(lambda: next(launcher.sweep("s").glob("*+*"), None), "a run directory")
    wait_until(lambda: len(rows(run)) > 3, "the run trains")
    ((pid, _, _),) = ours(launcher)
    os.kill(pid, signal.SIGKILL)
    assert launched.code == 1
    assert "1 lost" in launched.out
    assert "ended by SIGKILL" in launched.err
    lost = rows(run)

    assert launcher.run(*LONG, "runtime.seed=1").code == 0
    kept = [json.loads(line) for line in (run / "metrics-lost-1.jsonl").read_text().splitlines()]
    assert [row for row in kept if row["event"] == "train"][: len(lost)] == lost
    assert [row["update"] for row in rows(run)][:2] == [3, 6]


def test_abort_has_the_other_runs_save_and_starts_no_more(launcher: Launcher) -> None:
    endless = [*LONG, "training.tokens_per_parameter=60", "data.max_passes=1000"]
    launched = launcher.run(*endless, f"optimizer.lr={FAILS},0.004,0.003", "hydra.launcher.on_failure=abort")
    assert launched.code == 1
    assert "0 done" in launched.out
    assert "1 failed" in launched.out
    assert status(run_of(launcher.sweep("s"), "lr-0.004")) in ("interrupted", None)
    assert "waiting: lr-0.003" in launched.err


def test_a_detached_pool_finishes_by_itself(launcher: Launcher) -> None:
    began = time.monotonic()
    launched = launcher.run(*LONG, "runtime.seed=1", "hydra.launcher.detach=true")
    assert launched.code == 0, launched.err
    run = next(launcher.sweep("s").glob("*+*"))
    assert status(run) != "complete", f"it came back only after {time.monotonic() - began:.1f} s"
    wait_until(lambda: status(run) == "complete", "the run completes")
    log = launcher.sweep("s") / ".submitit" / "launcher.log"
    wait_until(lambda: "1 done" in log.read_text(), "the pool writes its log")


def test_one_bad_point_stops_the_sweep_before_anything_is_written(launcher: Launcher, tmp_path: Path) -> None:
    launched = launcher.run("model.heads=2,3")
    assert launched.code == 2
    assert launched.err.startswith("error: point 2 of 2 (model.heads=3): model.heads=3: expected a divisor")
    assert not (tmp_path / "outputs").exists()
