"""Runs on a SLURM cluster: job arrays through submitit, found again by whoever launches next.

submitit writes the script, pickles what each task calls (`run_in_slurm` on the point's directory) and handles
time limits. The jobs belong to SLURM from then on: a launcher that goes away leaves them alone, and the next
one reads their ids from sweep.json. See https://slurm.schedmd.com/sbatch.html for the settings.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError

from tiny_llm import files
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.plan import make_plan
from tiny_llm.config.schema import Count, Positive, PositiveInt
from tiny_llm.sweeps import slurm_queue
from tiny_llm.sweeps.crew import Alive, LaunchSettings
from tiny_llm.sweeps.points import Point
from tiny_llm.sweeps.slurm_queue import SlurmError
from tiny_llm.sweeps.slurm_run import run_in_slurm
from tiny_llm.sweeps.states import Label, read_standing
from tiny_llm.sweeps.sweep import JobArray, Sweep

Executor = TypeVar("Executor", bound=SlurmExecutor)

RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED")
# What the launcher itself writes into the script.
DECIDED = (
    "array",
    "output",
    "error",
    "open_mode",
    "signal",
    "comment",
    "job_name",
    "time",
    "nodes",
    "requeue",
)
# Settings that submitit knows under the same name.
PASSED_ON = (
    "nodes",
    "cpus_per_task",
    "cpus_per_gpu",
    "gpus_per_node",
    "gpus_per_task",
    "gres",
    "mem_per_cpu",
    "mem_per_gpu",
    "partition",
    "qos",
    "account",
    "constraint",
    "exclude",
)
POLLS_UNTIL_GONE = 2  # a shared file system may show a job's last status a little late


@dataclass(frozen=True)
class SlurmSettings(LaunchSettings):
    """hydra/launcher=slurm; names as in hydra-submitit-launcher where they mean the same."""

    name: str
    timeout_min: PositiveInt
    nodes: PositiveInt
    tasks_per_node: PositiveInt
    cpus_per_task: PositiveInt | None
    cpus_per_gpu: PositiveInt | None
    gpus_per_node: Count | str | None
    gpus_per_task: Count | str | None
    gres: str | None
    mem_gb: Positive | None
    mem_per_cpu: str | None
    mem_per_gpu: str | None
    partition: str | None
    qos: str | None
    account: str | None
    constraint: str | None
    exclude: str | None
    comment: str | None
    array_parallelism: PositiveInt
    signal_delay_s: PositiveInt
    preempt_signal: Literal["USR1", "USR2"]
    max_num_timeout: Count
    setup: tuple[str, ...]
    additional_parameters: dict  # type: ignore[type-arg]  # told from other values by isinstance
    dry_run: bool


def script_parameters(settings: SlurmSettings, token: str, parallelism: int) -> dict[str, Any]:
    """Return the settings as submitit's parameters. Raises ConfigError for those that the launcher decides."""
    for key in settings.additional_parameters:
        if key.replace("-", "_") in DECIDED:
            raise ConfigError(
                f"hydra.launcher.additional_parameters.{key} is decided by the launcher; leave it out"
            )
    parameters = {key: getattr(settings, key) for key in PASSED_ON}
    parameters |= {
        "job_name": settings.name,
        "time": settings.timeout_min,
        "ntasks_per_node": settings.tasks_per_node,
        "mem": None if settings.mem_gb is None else f"{round(settings.mem_gb * 1024)}MB",
        "comment": " ".join(filter(None, (settings.comment, token))),
        "array_parallelism": parallelism,
        "signal_delay_s": settings.signal_delay_s,
        "setup": [*_environment(settings), *settings.setup],
        "additional_parameters": {
            "requeue": True,
            "signal": f"{settings.preempt_signal}@{settings.signal_delay_s}",
            **settings.additional_parameters,
        },
    }
    return {key: value for key, value in parameters.items() if value is not None}


def _environment(settings: SlurmSettings) -> list[str]:
    """Return the lines that give a run as many threads as cores, and srun the cores of the job (since 22.05)."""
    return [
        f"export SUBMITIT_PREEMPT_SIGNAL={settings.preempt_signal}",
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
    ]


class ScriptExecutor(SlurmExecutor):
    """Writes scripts on machines without SLURM, too, for a dry run."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def text(self, count: int) -> str:
        """Return the sbatch script of `count` points."""
        if count > 1:
            self.parameters["map_count"] = count
        return str(self._make_submission_file_text(self._submitit_command_str, ""))


class Array:
    """A crew of SLURM jobs."""

    name = "slurm"
    longest_wait = 15.0  # squeue is everybody's

    def __init__(self, sweep: Sweep, settings: SlurmSettings) -> None:
        self.sweep = sweep
        self.settings = settings
        self.watched: set[str] = set()
        self._last: dict[str, Alive] = {}
        self._missing: dict[str, int] = {}

    def check(self, points: Sequence[Point]) -> None:
        for point in points:
            self._check_division(point)
        script_parameters(self.settings, "", 1)
        if not self.settings.dry_run:
            slurm_queue.require_slurm()

    def _check_division(self, point: Point) -> None:
        nodes, tasks = self.settings.nodes, self.settings.tasks_per_node
        try:
            make_plan(point.config, nodes * tasks)
        except ConfigError as error:
            raise ConfigError(
                f"{point.name}: hydra.launcher.nodes={nodes} and tasks_per_node={tasks} start it as {nodes * tasks} "
                f"ranks: {error}"
            ) from None

    def rehearses(self, points: Sequence[Point]) -> bool:
        if not self.settings.dry_run:
            return False
        path = self.sweep.jobs_folder / "dry_run.sh"
        executor = self._executor(ScriptExecutor, "tiny_llm-TOKEN", self.settings.array_parallelism)
        files.write_text(path, text := executor.text(len(points)))
        print(f"{text}\ndry run: nothing was submitted; the script is in {path}")
        return True

    def in_flight(self, points: Sequence[Point]) -> set[str]:
        self._find_orphans()
        jobs = {point.name: self.sweep.job_of(point.name) for point in points}
        if not any(jobs.values()):
            return set()
        queued = slurm_queue.queued_jobs()
        if queued is None:
            raise SlurmError(
                "squeue does not answer, and points of this sweep may be queued; try again later"
            )
        self.watched = {name for name, job in jobs.items() if job in queued}
        return set(self.watched)

    def submit(self, points: Sequence[Point], launch: int) -> None:
        size = slurm_queue.longest_array()
        chunks = [points[start : start + size] for start in range(0, len(points), size)]
        share = self.settings.array_parallelism // len(chunks)
        if not share:
            raise ConfigError(
                f"hydra.launcher.array_parallelism={self.settings.array_parallelism}: {len(points)} points make "
                f"{len(chunks)} arrays of at most {size} (MaxArraySize), each of which runs one job at least; "
                f"raise it to {len(chunks)}"
            )
        self.sweep.entrust(points, launch)
        for chunk in chunks:
            self._submit_chunk(chunk, share)
            self.watched |= {point.name for point in chunk}

    def alive(self) -> Mapping[str, Alive]:
        queued = slurm_queue.queued_jobs()
        if queued is not None:
            found = {name: self._look(name, queued) for name in self.watched}
            self._last = {name: alive for name, alive in found.items() if alive}
        return self._last

    def advance(self) -> None:
        """Nothing: SLURM does."""

    def began(self, name: str) -> bool:
        return name in self.watched

    def abort(self) -> None:
        slurm_queue.cancel([job for name in self._last if (job := self.sweep.job_of(name))])

    def leave(self) -> str:
        arrays = sorted({job.partition("_")[0] for name in self._last if (job := self.sweep.job_of(name))})
        return f"{len(self._last)} jobs stay queued or running; to stop them: scancel {' '.join(arrays)}"

    def log(self, name: str) -> Path | None:
        job = self.sweep.job_of(name)
        return self.sweep.jobs_folder / job / f"{job}_0_log.err" if job else None

    def verdict(self, name: str) -> str:
        job = self.sweep.job_of(name)
        state = slurm_queue.how_ended(job) if job else ""
        return f"job {job} ended {state}" if state else f"job {job}" if job else ""

    def _executor(self, kind: type[Executor], token: str, parallelism: int) -> Executor:
        executor = kind(self.sweep.jobs_folder / "%j", max_num_timeout=self.settings.max_num_timeout)
        executor.update_parameters(**script_parameters(self.settings, token, parallelism))
        return executor

    def _submit_chunk(self, points: Sequence[Point], parallelism: int) -> None:
        array = JobArray(f"tiny_llm-{uuid.uuid4().hex[:12]}", [point.name for point in points])
        self.sweep.arrays.append(array)
        self.sweep.write()
        executor = self._executor(SlurmExecutor, array.token, parallelism)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it also raises
                jobs = executor.map_array(run_in_slurm, [str(point.directory.absolute()) for point in points])
        except FailedJobError as error:
            self.sweep.arrays.remove(array)
            self.sweep.write()
            raise SlurmError(f"sbatch refused the sweep{self._queued_so_far()}: {error}") from None
        array.jobs = [job.job_id for job in jobs]
        self.sweep.write()

    def _queued_so_far(self) -> str:
        return f" after {len(self.watched)} points were queued, which go on" if self.watched else ""

    def _find_orphans(self) -> None:
        """Learn the job ids of arrays whose launcher died while it submitted them; forget what is not queued."""
        for array in [array for array in self.sweep.arrays if array.jobs is None]:
            job = slurm_queue.find_array(array.token)
            if job is None:
                self.sweep.arrays.remove(array)
            elif len(array.points) == 1:
                array.jobs = [job]
            else:
                array.jobs = [f"{job}_{index}" for index in range(len(array.points))]
            self.sweep.write()

    def _look(self, name: str, queued: Mapping[str, tuple[str, str]]) -> Alive | None:
        """Return how a watched point lives; None when its job is over, or as good as over."""
        job = self.sweep.job_of(name) or ""
        standing = read_standing(self.sweep.path / name)
        if job not in queued:
            self._missing[name] = self._missing.get(name, 0) + 1
            settled = standing.status in ("complete", "failed", "interrupted")
            return None if settled or self._missing[name] >= POLLS_UNTIL_GONE else self._last.get(name)
        self._missing.pop(name, None)
        state, reason = queued[job]
        if state == "COMPLETING" and standing.complete:
            return None
        label: Label = "running" if state in RUNNING else "waiting"
        shown = "" if reason in ("None", "Resources", "Priority", "JobArrayTaskLimit") else f" {reason}"
        return Alive(label, f"job {job}{shown}")
