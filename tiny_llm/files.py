"""A file is whole or absent: written beside its place under another name, made durable, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tiny_llm.config.errors import UserError, refusal


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Publish at `path` what `write` puts into a binary file; on any error the old file stays as it was.

    Raises OSError naming `path` where the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        if (refused := refusal(error)) is None:
            raise
        raise OSError(refused[0].errno, refused[0].strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """Return a JSON file's value. Raises UserError naming a damaged one."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; remove it or restore a copy") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a JSON file's object. Raises UserError naming a damaged one."""
    if not isinstance(value := read_json(path), dict):
        raise UserError(f"{path} is damaged: it holds no mapping; remove it or restore a copy")
    return value


def sync(path: Path) -> None:
    """Make a file's content, or a directory's entries, last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock file `path`, which the kernel frees when the process dies; raise UserError(busy) if taken."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(busy) from None
        yield
