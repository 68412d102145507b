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
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tiny_llm import files
from tiny_llm.config.errors import UserError, is_full


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
            kept = any(self.path.glob("*.pt"))
            way_out = (
                f"continue it with resume={self.path}" if kept else "it kept no state to continue: remove it"
            )
            raise UserError(
                f"output_dir={self.path} already holds a run; {way_out}, or choose another output_dir"
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
        value = {"status": status, **facts, **host}
        try:
            files.write_json(self / "status.json", value)
        except OSError as error:
            if not is_full(error) or not (self / "status.json").exists():
                raise
            with open(self / "status.json", "r+b") as file:  # over the old one: its block is there
                file.write(json.dumps(value).encode())
                file.truncate()

    @property
    def status(self) -> str | None:
        """What status.json says; None where it is absent, damaged or says nothing."""
        try:
            return str(files.read_json(self / "status.json")["status"])
        except (OSError, UserError, TypeError, KeyError):
            return None

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a torn last line is no row. Raises UserError naming a damaged line."""
        path = self / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                raise UserError(
                    f"{path} is damaged: line {number} holds no row; restore a copy of it"
                ) from None
        return rows

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


class Rows:
    """Appends rows to a file of JSON lines, whole lines only, and knows how long the file is.

    What a full disk refuses waits in memory for the next row: no training ends for a line of its log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        self._waiting = b""

    def append(self, rows: list[dict[str, Any]], warn: Callable[[str], None]) -> None:
        waited = bool(self._waiting)
        self._waiting += "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            self._write()
        except OSError as error:
            if not is_full(error):
                raise
            if not waited:
                warn(f"warning: {self._path}: the disk is full; rows wait in memory until there is space")

    def synced_bytes(self) -> int:
        """Make the rows durable and return the file's size: what a checkpoint refers to. Raises OSError."""
        self._write()
        if not self._path.exists():
            return 0
        files.sync(self._path)
        return self._path.stat().st_size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        if not self._waiting:
            return
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        whole = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(self._waiting)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(whole)
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._waiting = b""
