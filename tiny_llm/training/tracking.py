"""Mirrors of metrics.jsonl in TensorBoard or Weights & Biases.

metrics.jsonl is the truth; a tracker repeats its rows for those who like a browser. In flow rows, the dicts
that are written to metrics.jsonl; out flow scalars named event/key: train/loss, train/lr, validation/loss. A
list holds one number a worker and becomes three scalars: train/local_losses/min, /mean and /max.

A mirror that breaks (a full disk, no network, an expired login) warns once, falls silent and never stops the
training. Only a package that is missing is an error, before the training starts: `require_package`.
"""

from __future__ import annotations

import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tiny_llm import files
from tiny_llm.config.errors import UserError

Kind = Literal["none", "tensorboard", "wandb"]
Row = Mapping[str, Any]
T = TypeVar("T")

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb-id.txt"


class MissingPackage(UserError):
    """The tracker's package is not installed."""


class Sink(Protocol):
    """Where a tracker's scalars go."""

    def write(self, update: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Hands every row to a sink until the sink fails for the first time."""

    def __init__(
        self, kind: Kind, open_sink: Callable[[], Sink | None], warn: Callable[[str], object]
    ) -> None:
        self._kind = kind
        self._warn = warn
        self._sink = self._attempt(open_sink)

    def log(self, row: Row) -> None:
        """Mirror one row of metrics.jsonl."""
        if (sink := self._sink) is not None:
            self._attempt(lambda: sink.write(row["update"], dict(scalars_of(row))))

    def close(self) -> None:
        """Send what is still pending. A second call does nothing."""
        if (sink := self._sink) is not None:
            self._sink = None
            self._attempt(sink.close)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:
            self._sink = None
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            self._warn(
                f"tracking={self._kind} stopped: {reason}; training goes on, metrics.jsonl has every row"
            )
            return None


def require_package(kind: Kind) -> None:
    """Raise MissingPackage, naming the extra to install, unless the package behind `kind` can be imported."""
    try:
        if kind == "tensorboard":
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: F401
        elif kind == "wandb":
            # A name, not the module: a folder wandb/ that other runs left where we started imports as well.
            from wandb import init  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            f"tracking={kind} needs a package that cannot be imported ({error}); "
            f"pip install 'tiny-llm[{kind}]', or set tracking=none"
        ) from error


def open_tracker(
    kind: Kind,
    run_directory: Path,
    config: Mapping[str, Any],
    run_name: str,
    resume_update: int,
    *,
    warn: Callable[[str], object] = warnings.warn,
) -> Tracker:
    """Open the mirror of a run that continues after `resume_update` updates (0: a new run).

    `config` is plain data, shown beside the curves. `warn` gets the one sentence about a mirror that failed.
    Raises MissingPackage when the package behind `kind` is not installed.
    """
    require_package(kind)

    def open_sink() -> Sink | None:
        if kind == "tensorboard":
            return TensorBoardSink(run_directory / TENSORBOARD_FOLDER, config, resume_update)
        if kind == "wandb":
            return WandbSink(run_directory, config, run_name)
        return None

    return Tracker(kind, open_sink, warn)


def scalars_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield (event/key, number) for every number of a row, and min, mean and max of every list."""
    for key, value in row.items():
        name = f"{row['event']}/{key}"
        if key == "update":
            continue
        if isinstance(value, int | float):
            yield name, float(value)
        elif isinstance(value, list) and value:
            yield f"{name}/min", float(min(value))
            yield f"{name}/mean", float(sum(value) / len(value))
            yield f"{name}/max", float(max(value))


class TensorBoardSink:
    """An event file a start, one event a row. `tensorboard --logdir outputs` finds the folder.

    TensorBoard's own writer: torch's SummaryWriter wraps the same one, imports for a second and writes an
    event for every scalar.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_update: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=10)
        # The purge_step of other writers: readers drop what an earlier session wrote from this step on.
        self._add(resume_update + 1, session_log=SessionLog(status=SessionLog.START))
        listing = json.dumps(config, indent=2, default=str).replace("\n", "\n    ")
        self._add(resume_update, summary=text_pb("config", f"    {listing}"))

    def write(self, update: int, scalars: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in scalars.items()]
        self._add(update, summary=Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


class WandbSink:
    """One W&B run for the life of a run directory: WANDB_ID_FILE keeps its id. W&B's own variables apply."""

    def __init__(self, run_directory: Path, config: Mapping[str, Any], run_name: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tiny_llm"),
            name=run_name,
            id=_run_id(run_directory),
            resume="allow",
            dir=str(run_directory),
            config=dict(config),
            # W&B would wrap stdout, which the live line owns; run.log already keeps the lines.
            settings=wandb.Settings(console="off"),
        )
        # The x-axis is a metric: W&B's own step only grows, and would drop the rows repeated after a resume.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def write(self, update: int, scalars: dict[str, float]) -> None:
        self._run.log({"update": update, **scalars})

    def close(self) -> None:
        self._run.finish()


def _run_id(run_directory: Path) -> str:
    path = run_directory / WANDB_ID_FILE
    if not path.exists():
        files.write_text(path, uuid.uuid4().hex[:16])
    return path.read_text(encoding="ascii").strip()
