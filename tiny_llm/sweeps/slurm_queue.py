"""What SLURM knows about jobs, asked through its own commands.

`squeue` says which jobs there still are, `sacct` (where the cluster keeps accounts) how they ended, `scontrol`
how long an array may be. A controller that does not answer is no news: the caller keeps what it knew.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Sequence

from tiny_llm.config.errors import UserError

ARRAY_SIZE = 1001  # SLURM's default MaxArraySize
PATIENCE_SECONDS = 60


class SlurmError(UserError):
    """SLURM is not here, or refused something; the message holds its own words."""


def require_slurm() -> None:
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise SlurmError(
            "hydra/launcher=slurm: there is no sbatch here; log in to the cluster, or use "
            "hydra/launcher=local for this machine"
        )


def queued_jobs() -> dict[str, tuple[str, str]] | None:
    """Return this user's jobs in the queue, arrays task by task: state and reason by job id.

    None when nobody answers.
    """
    listed = _ask("squeue", "--noheader", "--array", "--user", _user(), "--format", "%i|%T|%r")
    if listed is None:
        return None
    rows = (line.strip().split("|", 2) for line in listed.splitlines() if line.count("|") > 1)
    return {job: (state, reason) for job, state, reason in rows}


def find_array(token: str) -> str | None:
    """Return the id of the job or array whose comment holds `token`; None when nothing of it is queued any more.

    Raises SlurmError when SLURM does not answer, since nothing may be submitted twice.
    """
    listed = _ask("squeue", "--noheader", "--array", "--user", _user(), "--format", "%F|%k")
    if listed is None:
        raise SlurmError(
            "squeue does not answer, so jobs of an earlier launch may be queued; try again later"
        )
    found = (line.strip().split("|", 1) for line in listed.splitlines() if token in line)
    return next((job for job, _ in found), None)


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs: SIGTERM, on which a run saves, and SIGKILL when KillWait is over."""
    for start in range(0, len(jobs), 500):
        _ask("scancel", *jobs[start : start + 500])


def longest_array() -> int:
    """Return how many tasks an array of this cluster may have."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "")
    return int(found[1]) if found else ARRAY_SIZE


def how_ended(job: str) -> str:
    """Return SLURM's word for the end of a job, such as 'OUT_OF_MEMORY'; empty where there are no accounts."""
    listed = _ask("sacct", "--noheader", "--allocations", "--parsable2", "--jobs", job, "--format", "State")
    return (listed or "").strip().splitlines()[-1] if (listed or "").strip() else ""


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
