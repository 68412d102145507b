"""Checkpoints: everything a run needs to go on, in one file that is whole or absent.

A state is plain data and tensors (`torch.load(weights_only=True)` reads it): config and identities, the three
arenas that carry state and their layout, counters, loader position, RNG, best result and how much of
metrics.jsonl it goes with. Weights to share are safetensors under the names of the single model.
"""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_llm import files
from tiny_llm.config.errors import UserError

FORMAT = 1
STATE_FILES = ("final.pt", "recovery.pt", "epoch-*.pt")

State = dict[str, Any]


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; the message names the file."""


def save_state(path: Path, state: State) -> None:
    """Publish a training state. Raises CheckpointError, leaving the file that was there before."""
    _publish(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def save_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Publish weights as safetensors, contiguous and on the CPU."""
    from safetensors.torch import save

    on_cpu = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    _publish(path, lambda file: file.write(save(on_cpu, {"format": "pt", **metadata})))


def _publish(path: Path, write: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, write)
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = (
            os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize if path.parent.exists() else 0
        )
        reason = "the disk is full" if full or free < 2**20 else " ".join(str(error).split())
        kept = "the previous one is kept" if path.exists() else "earlier checkpoints are kept"
        raise CheckpointError(
            f"{path} could not be saved: {reason}; {kept}. Free space, then resume"
        ) from None


def load_state(path: Path, verify: bool = True) -> State:
    """Return a training state. Raises CheckpointError naming a missing, damaged or foreign file.

    verify=False maps the file instead of reading it, to look at its counters without checking its content.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name a run directory or one of its .pt files")
    try:
        if verify:
            _check_content(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=not verify)
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{path} is no training state of tiny_llm")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}; this version reads format {FORMAT}")
    return state


def _check_content(path: Path) -> None:
    """Compare every record of the archive with its CRC-32, which torch.load itself does not."""
    with zipfile.ZipFile(path) as archive:
        if (record := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {record} is wrong")


def newest_state(directory: Path) -> Path:
    """Return the whole state in a run directory that has seen the most updates. Raises CheckpointError."""
    found, damaged = [], []
    for path in sorted(path for pattern in STATE_FILES for path in directory.glob(pattern)):
        try:
            found.append((load_state(path, verify=False)["update"], path.name == "final.pt", path))
        except CheckpointError as error:
            damaged.append(str(error))
    for *_, path in sorted(found, reverse=True):
        try:
            load_state(path)
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return path
    raise CheckpointError(
        f"{directory} holds no training state to resume from"
        + (f" ({'; '.join(damaged)})" if damaged else "")
        + "; start it again in another output_dir"
    )
