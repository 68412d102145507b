"""Sweeps on a real SLURM: what is killed, cancelled or requeued ends as if nothing had been."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from sweeping import LONG, Launcher, assert_same_bits, deduplicated, rows, starts, status, wait_until

from tiny_llm.config.compose import compose
from tiny_llm.train import train

GRID = [*LONG, "decentralized.num_models=2", "decentralized=awc,atc", "topology=complete,one_peer_ring"]
GRID += ["runtime.seed=1,2"]


def ask(slurm: Launcher, *command: str) -> str:
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, check=True)
    return done.stdout


def job_of(sweep: Path, run: Path) -> str | None:
    """Return the newest job of a run, once sweep.json tells it."""
    path = sweep / "sweep.json"
    arrays: list[dict[str, Any]] = json.loads(path.read_text())["arrays"] if path.exists() else []
    for array in reversed(arrays):
        if run.name in array["points"] and array["jobs"]:
            return str(array["jobs"][array["points"].index(run.name)])
    return None


def start_now(slurm: Launcher, job: str) -> None:
    """Spare a requeued job the two minutes that SLURM has it wait."""

    def pending() -> bool:
        return "PENDING" in ask(slurm, "squeue", "--noheader", "--array", "--jobs", job, "--format", "%T")

    wait_until(pending, f"job {job} is requeued")
    ask(slurm, "scontrol", "update", f"jobid={job}", "StartTime=now")


def test_a_sweep_survives_kills_cancellations_and_requeues(
    slurm: Launcher, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    listed = slurm.run(*GRID, "dry_run=true")
    assert listed.code == 0, listed.err
    names = [point["name"] for point in json.loads(listed.out)]
    assert len(names) == 8
    sweep = slurm.sweep("s")
    requeued, cancelled, preempted, broken = (sweep / names[index] for index in (0, 1, 2, 7))
    (broken / "run.log").mkdir(parents=True)  # the run cannot write its log

    first = slurm.start(*GRID)
    wait_until(lambda: rows(requeued), "the first run trains")
    first.process.kill()
    second = slurm.start(*GRID)
    wait_until(lambda: "8 still in the queue, 0 to start" in second.out, "the next launcher finds the jobs")
    job = str(job_of(sweep, requeued))
    ask(slurm, "scontrol", "requeue", job)
    wait_until(lambda: rows(cancelled) or status(cancelled) == "complete", "the second run trains")
    ask(slurm, "scancel", str(job_of(sweep, cancelled)))
    start_now(slurm, job)
    wait_until(lambda: rows(preempted), "the third run trains")
    preempted_job = str(job_of(sweep, preempted))
    ask(slurm, "scancel", "--signal=USR2", f"{preempted_job}.0")  # as slurmd does before the time limit
    start_now(slurm, preempted_job)
    ended = second
    assert "6 done, 1 interrupted, 1 failed" in ended.out, ended.out + ended.err
    assert ended.code == 1

    third = slurm.run(*GRID)
    assert third.code == 1
    assert "8 points, 6 done, 0 still in the queue, 1 to start, 1 failed before" in third.out
    assert "7 done, 1 failed" in third.out
    told = third.err.partition(f"failed: {broken.name}\n")[2].partition("\n\n")[0]
    assert "IsADirectoryError" in told
    assert "runtime.seed=2" in told
    assert f"directory  outputs/sweeps/s/{broken.name}" in told

    assert [starts(sweep / name) for name in names] == [2, 2, 2, 1, 1, 1, 1, 1]
    for run in (requeued, cancelled, preempted):
        assert len(rows(run)) == len({row["update"] for row in rows(run)}), "an update is told twice"
        log = (run / "run.log").read_text()
        assert "(resumed at update" in log, "it went on from where it was"
    whole = [text for text in GRID if "," not in text]
    whole += ["decentralized=awc", "topology=complete", "runtime.seed=1", f"output_dir={tmp_path}/whole"]
    train(compose(deduplicated(*tiny_overrides, *whole)))
    assert_same_bits(requeued, tmp_path / "whole")


def test_a_run_is_requeued_no_more_after_its_last_time_limit(slurm: Launcher) -> None:
    launch = slurm.start(
        *LONG, "runtime.seed=1", "hydra.launcher.max_num_timeout=0", "hydra.launcher.timeout_min=5"
    )
    run = wait_until(lambda: next(slurm.sweep("s").glob("*+*"), None), "a run directory")
    wait_until(lambda: rows(run), "the run trains")
    ask(
        slurm,
        "scancel",
        "--signal=USR2",
        wait_until(lambda: job_of(slurm.sweep("s"), run), "the job is known"),
    )
    assert ended.code == 1
    assert "1 interrupted" in ended.out
    assert "timed-out too many times" in ended.err
    assert (run / "recovery.pt").exists()
    assert status(run) == "interrupted"


def test_what_slurm_refuses_is_told_in_its_own_words(slurm: Launcher) -> None:
    ended = slurm.run("hydra.launcher.partition=nosuch")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("error: sbatch refused the sweep: ")
    assert "invalid partition specified: nosuch" in ended.err
