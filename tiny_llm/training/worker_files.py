"""An epoch's training state of several workers as a set of files, one a worker and one root.

    node-000/epoch-003.pt  node-001/epoch-003.pt ...   a worker's own weights and moments by name, no padding
    epoch-003.pt                                       what they share, and each worker file's SHA-256

Worker files are written first and the root last, so a set without a root is no set and is written again; a set
with a root never changes. Reading starts at the root and checks the complete set before anything is used.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_llm.decentralized.arena import Entry, Layout
from tiny_llm.training.checkpoint import (
    STATE_FILES,
    CheckpointError,
    State,
    load_state,
    save_state,
    save_weights,
)

ARENAS = {"parameters": "weights", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
MUST_AGREE = ("update", "position", "identity", "config")


def worker_directory(directory: Path, i: int) -> Path:
    return directory / f"node-{i:03d}"


def save_epoch(path: Path, state: State, layout: Layout, weights_alone: bool) -> None:
    """Publish an epoch's weights as safetensors (of several workers each one's and their mean) and training state.

    path: the root's, without a suffix. weights_alone leaves the training state out.
    """
    facts = {
        "update": str(state["update"]),
        "tokens": str(state["tokens"]),
        "recipe": state["identity"]["recipe"],
    }
    rows_ND = state["parameters"]
    if len(rows_ND) > 1:
        for i, row_D in enumerate(rows_ND):
            file = worker_directory(path.parent, i) / f"{path.name}.safetensors"
            save_weights(file, layout.views(row_D), {**facts, "worker": str(i)})
    mean_D = rows_ND.mean(0, dtype=torch.promote_types(rows_ND.dtype, torch.float32))
    save_weights(path.with_name(f"{path.name}.safetensors"), layout.views(mean_D), facts)
    if not weights_alone:
        save_epoch_state(path.with_name(f"{path.name}.pt"), state, layout)


def save_epoch_state(root: Path, state: State, layout: Layout) -> None:
    """Publish a training state: of one worker whole, of several as worker files and `root`.

    What is published already is left as it is.
    """
    if root.exists():
        return
    if len(state["parameters"]) == 1:
        save_state(root, state)
        return
    workers = []
    for i in range(len(state["parameters"])):
        path = worker_directory(root.parent, i) / root.name
        save_state(path, _worker_state(state, layout, i))
        workers.append({"file": path.relative_to(root.parent).as_posix(), "sha256": sha256(path)})
    shared = {key: value for key, value in state.items() if key not in ARENAS}
    save_state(root, {**shared, "workers": workers})


def _worker_state(state: State, layout: Layout, i: int) -> State:
    """Return what is worker i's own, in tensors that carry no other worker's bytes."""
    own: dict[str, Any] = {
        name: {key: view.clone() for key, view in layout.views(state[arena][i]).items()}
        for arena, name in ARENAS.items()
    }
    agreed = {key: state[key] for key in MUST_AGREE}
    return {**own, **agreed, "step": state["update"], "index": i, "workers_in_all": len(state["parameters"])}


def load_whole(path: Path, verify: bool = True) -> State:
    """Return a training state with its arenas, put together from worker files where `path` is a root.

    verify=False trusts the content, which another process has checked. Raises CheckpointError naming the first file
    of the set that is missing, damaged or of another set.
    """
    state = load_state(path, verify)
    if "index" in state:
        raise CheckpointError(
            f"{path} is worker {state['index']}'s part of a training state and cannot resume a run by itself; "
            f"name the root, {path.parent.parent / path.name}"
        )
    if "workers" not in state:
        return state
    layout = Layout(tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in state["layout"]))
    workers = [_open_worker(path, state, i, layout, verify) for i in range(len(state["workers"]))]
    arenas = {arena: _arena([worker[name] for worker in workers], layout) for arena, name in ARENAS.items()}
    return {**{key: value for key, value in state.items() if key != "workers"}, **arenas}


def newest_state(directory: Path) -> Path:
    """Return the whole state in a run directory that has seen the most updates. Raises CheckpointError.

    Damaged ones that it passes over are told on stderr.
    """
    found, damaged = [], []
    for path in sorted(path for pattern in STATE_FILES for path in directory.glob(pattern)):
        try:
            found.append((load_state(path, verify=False)["update"], path.name == "final.pt", path))
        except CheckpointError as error:
            damaged.append(str(error))
    for *_, path in sorted(found, reverse=True):
        try:
            load_whole(path)
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            for line in damaged:
                print(f"warning: {line}; {path.name} is used instead", file=sys.stderr)
            return path
    raise CheckpointError(
        f"{directory} holds no training state to resume from"
        + (f" ({'; '.join(damaged)})" if damaged else "")
        + "; remove it and start again, or start in another output_dir"
    )


def _open_worker(root: Path, state: State, i: int, layout: Layout, verify: bool) -> State:
    reference = state["workers"][i]
    path = root.parent / reference["file"]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, so {root} is incomplete; resume from another epoch")
    if verify and sha256(path) != reference["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is not the one in {root.name}; resume from another epoch"
        )
    worker = load_state(path, verify)
    expected = {**{key: state[key] for key in MUST_AGREE}, "step": state["update"], "index": i}
    expected["workers_in_all"] = len(state["workers"])
    for key, value in expected.items():
        if worker[key] != value:
            raise CheckpointError(f"{path} belongs to another set than {root}: its {key} differs")
    shapes = {entry.name: entry.shape for entry in layout.entries}
    for name in ARENAS.values():
        if {key: tuple(value.shape) for key, value in worker[name].items()} != shapes:
            raise CheckpointError(
                f"{path} holds another model: the names or shapes of {name} differ from {root}"
            )
    return worker


def _arena(workers: list[dict[str, Tensor]], layout: Layout) -> Tensor:
    some = next(iter(workers[0].values()))
    arena = torch.zeros(len(workers), layout.size, dtype=some.dtype)
    for row, values in zip(arena, workers, strict=True):
        for name, view in layout.views(row).items():
            view.copy_(values[name])
    return arena


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
