"""Groups of ranks: processes on this machine that join as those of a run do and work on what a test hands them.

They are forks of a server that has imported torch once, so that a group stands within milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tiny_llm.config.placement import Placement, quieten_torch
from tiny_llm.distributed.ranks import open_ranks

quieten_torch()  # as the door does; the server has torch before it
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tiny_llm.training.start", "tiny_llm.train", "pytest"])

CPU = torch.device("cpu")
PATIENCE_SECONDS = 120.0  # for all of a group's work


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environments(world: int) -> list[dict[str, str]]:
    """What a starter of `world` ranks on this machine tells each of them."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(world)]


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, timeout_seconds: float = 30.0) -> Any:
    """Return what work(ranks, *arguments) returned on each of `world` ranks, in their order."""
    with tempfile.TemporaryDirectory() as name:
        processes = start_ranks(world, Path(name), work, *arguments, timeout_seconds=timeout_seconds)
        for process in processes:
            process.join(PATIENCE_SECONDS)
            process.kill()
        return [outcome(Path(name), rank) for rank in range(world)]


def start_ranks(
    world: int,
    folder: Path,
    work: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 30.0,
    first_lingers: bool = True,
) -> list[BaseProcess]:
    """Begin what `on_ranks` waits for; each rank leaves its outcome in the folder.

    first_lingers: whether the first rank, which keeps the store, ends after all others.
    """
    processes: list[BaseProcess] = []
    for rank, environment in enumerate(environments(world)):
        placement = Placement(rank, world, rank, world)
        details = (environment, placement, folder, timeout_seconds, first_lingers, work, arguments)
        processes.append(SERVER.Process(target=_work_as_rank, args=details))
        processes[-1].start()
    return processes


def outcome(folder: Path, rank: int) -> Any:
    """Return what a rank's work returned. Raises RuntimeError with the traceback of what it raised."""
    path = folder / f"rank-{rank}.pt"
    assert path.exists(), f"rank {rank} left nothing"
    returned, raised = torch.load(path, weights_only=False)
    if raised is not None:
        raise RuntimeError(f"on rank {rank}:\n{raised}")
    return returned


def _work_as_rank(
    environment: dict[str, str],
    placement: Placement,
    folder: Path,
    timeout_seconds: float,
    first_lingers: bool,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"rank-{placement.rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    returned = raised = None
    try:
        with open_ranks(placement, CPU, timeout_seconds) as ranks:
            returned = work(ranks, *arguments)
    except BaseException:
        raised = traceback.format_exc()
    path = folder / f"rank-{placement.rank}.pt"
    torch.save((returned, raised), path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    if first_lingers and placement.first:
        _wait(lambda: len(list(folder.glob("rank-*.pt"))) == placement.world)


def _wait(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
