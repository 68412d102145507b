"""Checkpoints: everything a run needs to go on, in one file that is whole or absent.

A state is plain data and tensors (`torch.load(weights_only=True)` reads it): config and identities, the three
arenas that carry state and their layout, counters, loader position, RNG, best result and how much of
metrics.jsonl it goes with. Weights to share are safetensors under the names of the single model.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_llm import files
from tiny_llm.config.errors import UserError, refusal
from tiny_llm.interop.tensors import write_tensors

FORMAT = 1
STATE_FILES = ("final.pt", "recovery.pt", "epoch-*.pt")

State = dict[str, Any]


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; the message names the file."""


class DamagedRecordError(ValueError):
    """A record of a state whose bytes are not those that were written."""


def save_state(path: Path, state: State) -> None:
    """Publish a training state. Raises CheckpointError, leaving the file that was there before."""
    with _publishing(path):
        files.write_whole(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def save_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Publish weights as safetensors. Raises CheckpointError, leaving the file that was there before."""
    with _publishing(path):
        write_tensors(path, weights, metadata)


@contextlib.contextmanager
def _publishing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError) as error:
        refused = refusal(error)
        reason = refused[1] if refused else " ".join(str(error).split())
        run = path.parent.parent if path.parent.name.startswith("node-") else path.parent
        found = sorted(old.name for pattern in STATE_FILES for old in run.glob(pattern))
        kept = f"kept: {', '.join(found)}, to go on from with resume={run}" if found else "none is kept"
        raise CheckpointError(f"{path} could not be saved: {reason}; {kept}") from None


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
        reason = error if isinstance(error, DamagedRecordError) else "it is cut short or no training state"
        raise CheckpointError(f"{path} is damaged: {reason}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{path} is no training state of tiny_llm")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}; this version reads format {FORMAT}")
    return state


def _check_content(path: Path) -> None:
    """Compare every record of the archive with its CRC-32, which torch.load itself does not."""
    with zipfile.ZipFile(path) as archive:
        if (record := archive.testzip()) is not None:
            raise DamagedRecordError(f"the checksum of {record} is wrong")
