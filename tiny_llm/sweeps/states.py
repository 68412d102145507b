"""How a run stands, read from its directory: the launcher's only source besides who is still alive.

status.json says what the run itself last knew, the end of metrics.jsonl how far it has come. Whether the
process behind a `running` still lives is for the caller to say: the pool knows its children, the array the
queue.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tiny_llm.config.errors import UserError
from tiny_llm.training.run_directory import RunDirectory

# What a sweep calls its points. `lost`: the process ended without a word, by a kill, a crash or a dead node.
Label = Literal["waiting", "running", "done", "failed", "interrupted", "lost"]
LABELS: tuple[Label, ...] = ("waiting", "running", "done", "interrupted", "failed", "lost")
TAIL_BYTES = 2**16


@dataclass(frozen=True)
class Standing:
    """What a run directory says: its status (None: never started), its newest row, its error."""

    status: str | None
    update: int | None = None
    updates: int | None = None
    loss: float | None = None
    seconds_left: float | None = None
    error: str | None = None

    @property
    def complete(self) -> bool:
        return self.status == "complete"


def read_standing(directory: Path) -> Standing:
    """Return how the run in `directory` stands. A file that is being written, or damaged, counts as absent."""
    run = RunDirectory(directory)
    stated = _read(run / "status.json")
    status = stated.get("status")
    result = _read(run / "result.json")
    if status == "complete" and not result:
        status = "interrupted"
    row = _last_row(run / "metrics.jsonl", "train")
    updates = stated.get("updates")
    return Standing(
        status=status,
        update=row.get("update"),
        updates=updates,
        loss=result.get("final_validation_loss") if status == "complete" else row.get("loss"),
        seconds_left=_seconds_left(row, updates),
        error=stated.get("error") if status == "failed" else None,
    )


def label(standing: Standing, alive: Label | None, submitted: bool) -> Label:
    """Return what a point is called, given whether its job is `alive` and whether it was ever handed on."""
    if alive:
        return alive
    if standing.status is None:
        return "lost" if submitted else "waiting"
    named: dict[str, Label] = {"complete": "done", "failed": "failed", "interrupted": "interrupted"}
    return named.get(standing.status, "lost")


def is_held(directory: Path) -> bool:
    """Whether a process of this machine is training in `directory`."""
    if not (directory / ".lock").exists():
        return False
    try:
        with RunDirectory(directory).locked():
            return False
    except UserError:
        return True


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that hold anything."""
    text = _tail(path).decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _last_row(path: Path, event: str) -> dict[str, Any]:
    for line in reversed(_tail(path).splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the first line of the tail may be cut, the last one half written
        if isinstance(row, dict) and row.get("event") == event:
            return row
    return {}


def _tail(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _seconds_left(row: dict[str, Any], updates: int | None) -> float | None:
    if not row or not updates or not row.get("tokens_per_second"):
        return None
    tokens_an_update = float(row["tokens"]) / row["update"]
    return float((updates - row["update"]) * tokens_an_update / row["tokens_per_second"])
