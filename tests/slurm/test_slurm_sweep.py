"""Sweeps on a real SLURM: what is killed, cancelled or requeued ends as if nothing had been."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from sweeping import LONG, Launcher, assert_same_bits, deduplicated, rows, starts, status, wait_until

from tiny_llm.config.compose import compose
from tiny_llm.train import train

GRID = [*LONG, "decentralized.num_models=2", "decentralized=awc,atc", "topology=complete,one_peer_ring"]
GRID += ["runtime.seed=1,2"]


def ask(slurm: Launcher, *command: str) -> str:
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, check=True)
    return done.stdout


def job_of(sweep: Path, run: Path) -> str:
    """Return the newest job of a run."""
    arrays = json.loads((sweep / "sweep.json").read_text())["arrays"]
    array = next(array for array in reversed(arrays) if run.name in array["points"])
    return str(array["jobs"][array["points"].index(run.name)])


def just_begun(runs: Iterable[Path]) -> Path | None:
    """Return a run that trains and is far from its end."""
    return next((run for run in runs if status(run) == "running" and 0 < len(rows(run)) < 20), None)


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
    runs = [sweep / name for name in names]
    requeued, broken = runs[0], runs[-1]
    (broken / "run.log").mkdir(parents=True)  # the run cannot write its log
    slurm.overrides += GRID

    first = slurm.start()
    wait_until(lambda: rows(requeued), "the first run trains")
    first.process.kill()
    job = job_of(sweep, requeued)
    ask(slurm, "scontrol", "requeue", job)
    second = slurm.start()
    start_now(slurm, job)
    wait_until(lambda: "8 points, " in second.out, "the next launcher has read the queue")
    cancelled = wait_until(lambda: just_begun(runs[1:-1]), "another run trains")
    ask(slurm, "scancel", job_of(sweep, cancelled))
    preempted = wait_until(lambda: just_begun(set(runs[1:-1]) - {cancelled}), "yet another run trains")
    ask(slurm, "scancel", "--signal=USR2", f"{job_of(sweep, preempted)}.0")  # as before a time limit
    start_now(slurm, job_of(sweep, preempted))
    assert second.code == 1
    assert "6 done, 1 interrupted, 1 failed" in second.out, second.out + second.err

    assert " 0 to start" in second.out, "no point is submitted twice"

    third = slurm.run()
    assert third.code == 1
    assert "8 points, 6 done, 0 still in the queue, 1 to start, 1 failed before" in third.out
    assert "7 done, 1 failed" in third.out
    told = third.err.partition(f"failed: {broken.name}\n")[2].partition("\n\n")[0]
    assert "IsADirectoryError" in told
    assert "runtime.seed=2" in told
    assert f"directory  outputs/sweeps/s/{broken.name}" in told

    assert {run for run in runs if starts(run) == 2} == {requeued, cancelled, preempted}
    assert sum(map(starts, runs)) == len(runs) + 3
    for run in (requeued, cancelled, preempted):
        assert len(rows(run)) == len({row["update"] for row in rows(run)}), "an update is told twice"
        log = (run / "run.log").read_text()
        assert "(resumed at update" in log, "it went on from where it was"
    whole = [text for text in GRID if "," not in text]
    whole += ["decentralized=awc", "topology=complete", "runtime.seed=1", f"output_dir={tmp_path}/whole"]
    train(compose(deduplicated(*tiny_overrides, *whole)))
    assert_same_bits(requeued, tmp_path / "whole")


def test_a_run_of_two_ranks_goes_on_after_a_requeue_and_a_time_limit(
    slurm: Launcher, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    gossip = [*LONG, "decentralized=awc", "decentralized.num_models=2", "runtime.seed=1"]
    launched = slurm.start(*gossip, "hydra.launcher.tasks_per_node=2", "hydra.launcher.gpus_per_node=2")
    run = wait_until(lambda: next(slurm.sweep("s").glob("*+*"), None), "a run directory")
    for attempt, command in (
        (1, ["scontrol", "requeue"]),
        (2, ["scancel", "--signal=USR2"]),
    ):
        wait_until(lambda n=attempt: rows(run) and starts(run) == n, f"attempt {attempt} trains")  # type: ignore[misc]
        job = job_of(slurm.sweep("s"), run)
        ask(slurm, *command, f"{job}.0" if "scancel" in command else job)
        start_now(slurm, job)
    assert launched.code == 0, launched.err
    assert starts(run) == 3
    assert (run / "run.log").read_text().count("(resumed at update") == 2
    assert json.loads((run / "result.json").read_text())["ranks"] == 2
    whole = [*gossip, f"output_dir={tmp_path}/whole"]
    train(compose(deduplicated(*tiny_overrides, *whole)))
    assert_same_bits(run, tmp_path / "whole")


def test_a_run_is_requeued_no_more_after_its_last_time_limit(slurm: Launcher) -> None:
    launched = slurm.start(
        *LONG, "runtime.seed=1", "hydra.launcher.max_num_timeout=0", "hydra.launcher.timeout_min=5"
    )
    run = wait_until(lambda: next(slurm.sweep("s").glob("*+*"), None), "a run directory")
    wait_until(lambda: rows(run), "the run trains")
    ask(
        slurm,
        "scancel",
        "--signal=USR2",
        job_of(slurm.sweep("s"), run),
    )
    assert launched.code == 1
    assert "1 interrupted" in launched.out
    assert "timed-out too many times" in launched.err
    assert (run / "recovery.pt").exists()
    assert status(run) == "interrupted"


def test_what_slurm_refuses_is_told_in_its_own_words(slurm: Launcher) -> None:
    launched = slurm.run("hydra.launcher.partition=nosuch")
    assert launched.code == 2
    assert len(launched.err.splitlines()) == 1
    assert launched.err.startswith("error: sbatch refused the sweep: ")
    assert "invalid partition specified: nosuch" in launched.err


def test_a_detached_launch_leaves_its_jobs_to_slurm(slurm: Launcher) -> None:
    held = ["runtime.seed=1,2", "+hydra.launcher.additional_parameters.hold=true"]
    launched = slurm.run(*held, "hydra.launcher.detach=true")
    assert launched.code == 0, launched.err
    assert "submitted; to watch: python -m tiny_llm.train -m " in launched.out
    again = slurm.run(*held, "hydra.launcher.detach=true")
    assert "2 points, 0 done, 2 still in the queue, 0 to start" in again.out
