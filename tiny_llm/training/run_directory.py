"""A run's directory: what it holds, who may write it, and how rows are added and cut.

resolved.yaml     the whole config          environment.json  versions, hardware, identities
metrics.jsonl     one row a line            run.log           the plain lines that were shown
samples.jsonl     one text a line for each of evaluation.prompts and epoch
status.json       running | interrupted | failed | complete   best.json, result.json, loss.png
final.pt, recovery.pt, epoch-NNN.pt, epoch-NNN.safetensors    see checkpoint.py
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny_llm import files
from tiny_llm.config.errors import UserError


class RunDirectory:
    """One run's files. Use `locked()` around everything that writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def holds_run(self) -> bool:
        return (self / "resolved.yaml").exists() or (self / "metrics.jsonl").exists()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out for as long as this one lives."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir={self.path}: {error.strerror}; choose another output_dir") from None
        busy = f"{self.path} is in use by another process; wait for it, or choose another output_dir"
        with files.exclusive(self / ".lock", busy):
            yield

    def refuse_existing_run(self) -> None:
        if self.holds_run:
            raise UserError(
                f"output_dir={self.path} already holds a run; continue it with resume={self.path}, "
                "or choose another output_dir"
            )

    def put_aside(self) -> None:
        """Make room for a first start where an attempt died before it had saved anything; its rows are kept."""
        rows = self / "metrics.jsonl"
        if rows.exists():
            number = 1 + len(list(self.path.glob("metrics-lost-*.jsonl")))
            rows.rename(self / f"metrics-lost-{number}.jsonl")
        (self / "resolved.yaml").unlink(missing_ok=True)

    def set_status(self, status: str, **facts: Any) -> None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        host = {"pid": os.getpid(), "host": socket.gethostname(), "time": when}
        files.write_json(self / "status.json", {"status": status, **facts, **host})

    @property
    def status(self) -> str | None:
        path = self / "status.json"
        return str(files.read_json(path)["status"]) if path.exists() else None

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        path = self / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def append_samples(self, rows: list[dict[str, Any]]) -> None:
        """Add an epoch's rows to samples.jsonl, durably."""
        if rows:
            with open(self / "samples.jsonl", "ab") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
                file.flush()
                os.fsync(file.fileno())

    def samples_bytes(self) -> int:
        """Return how long samples.jsonl is: what a checkpoint refers to."""
        path = self / "samples.jsonl"
        return path.stat().st_size if path.exists() else 0

    def copy_history(self, source: RunDirectory, kept: dict[str, int]) -> None:
        """Begin this directory with the rows that `source` had at a checkpoint, and cut what came later.

        kept: the bytes that each file of rows had then.
        """
        for name, length in kept.items():
            if source.path.resolve() != self.path.resolve() and (source / name).exists():
                shutil.copyfile(source / name, self / name)
            path = self / name
            size = path.stat().st_size if path.exists() else 0
            if size < length:
                raise UserError(
                    f"{path} has {size} bytes, but had {length} when the checkpoint was saved; "
                    "restore it, or resume into another output_dir from a copy that has it"
                )
            if size:
                os.truncate(path, length)


class Metrics:
    """Appends rows to metrics.jsonl, whole lines only, and knows how long the file is."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab")  # noqa: SIM115 - open as long as the run

    def append(self, row: dict[str, Any]) -> None:
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()

    def synced_bytes(self) -> int:
        """Make the rows durable and return the file's size: what a checkpoint refers to."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
