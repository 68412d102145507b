"""What a SLURM task calls: the run of one point, and its way back into the queue.

On submitit's signal (time limit, preemption) the trainer saves recovery.pt at the next update boundary and
ends; only then is the signal passed on to submitit, which requeues the job or, after `max_num_timeout` time
limits, does not. The requeued job finds the directory and goes on.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from submitit.core.job_environment import JobEnvironment
from submitit.helpers import Checkpointable, TorchDistributedEnvironment

from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.sweeps.job import run_point


class SlurmRun(Checkpointable):
    """Runs the point whose directory it is called with."""

    def __call__(self, directory: str) -> None:
        environment = JobEnvironment()
        signal.signal(signal.SIGTERM, _end)  # submitit would ignore it until the trainer listens
        if environment.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        try:
            with user_errors_in_one_line():
                run_point(Path(directory))
        except SystemExit as end:
            if end.code != 128 + environment._usr_sig():
                raise
            if (
                environment.global_rank == 0
            ):  # the others leave in peace: a bad end could end the first one, too
                _requeue(environment._usr_sig())
                raise


def _requeue(number: int) -> None:
    """Let submitit's own handler decide; what SLURM sends twice, or on requeueing, is ignored."""
    handler = signal.getsignal(number)
    signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert callable(handler)
    handler(number, None)


run_in_slurm = SlurmRun()  # type: ignore[no-untyped-call]


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
