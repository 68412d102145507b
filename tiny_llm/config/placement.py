"""Where this process stands among those that train one run together, from the environment of its starter.

torchrun and the sweep launcher set RANK and WORLD_SIZE; a bare `srun` sets SLURM_PROCID and the size of its step.
Without them a process is alone.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiny_llm.config.errors import UserError

SLURM_STEP = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


@dataclass(frozen=True)
class Placement:
    """rank of world processes; local_rank of local_world on this machine; attempts that ended before this one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes, logs and draws for all."""
        return self.rank == 0


def find_placement(environment: Mapping[str, str] | None = None) -> Placement:
    """Return this process's placement. Raises UserError for variables that contradict one another."""
    environment = os.environ if environment is None else environment
    restarts = max(
        _number(environment, f"{starter}_RESTART_COUNT", 0) for starter in ("TORCHELASTIC", "SLURM")
    )
    names = {name: name for name in SLURM_STEP}
    if "WORLD_SIZE" not in environment:
        if _number(environment, SLURM_STEP["WORLD_SIZE"], 1) == 1:
            return Placement(restarts=restarts)
        names = SLURM_STEP
    world = _number(environment, names["WORLD_SIZE"], 1)
    rank = _number(environment, names["RANK"], -1)
    if not 0 <= rank < world:
        stated = f"{names['RANK']} is {environment.get(names['RANK'], 'not set')}"
        raise UserError(
            f"{names['WORLD_SIZE']}={world} but {stated}: expected 0 to {world - 1}; start the ranks with torchrun "
            f"or srun, or unset {names['WORLD_SIZE']} for a single process"
        )
    local_world = _number(environment, "LOCAL_WORLD_SIZE", _tasks_here(environment, world))
    return Placement(rank, world, _number(environment, names["LOCAL_RANK"], rank), local_world, restarts)


def quieten_torch() -> None:
    """Keep torch's own pages about broken connections off the screen; call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def torchrun_started() -> datetime.datetime | None:
    """Return when the torchrun above this process was started; None without one.

    It is the same for all of its ranks and attempts. Linux tells it; elsewhere ranks agree on the first one's name.
    """
    stat = Path(f"/proc/{os.getppid()}/stat")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not stat.exists():
        return None
    ticks_after_boot = int(stat.read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return datetime.datetime.fromtimestamp(
        int(boot.split()[1]) + ticks_after_boot // os.sysconf("SC_CLK_TCK")
    )


def _tasks_here(environment: Mapping[str, str], world: int) -> int:
    """Return a step's tasks on this node: the first number of such as 4(x2) or 3,2."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", str(world))
    return int(tasks.split(",")[0].split("(")[0])


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environment.get(name, "")
    if value and not value.isdigit():
        raise UserError(f"the environment has {name}={value}: expected an integer >= 0; unset it")
    return int(value) if value else otherwise
