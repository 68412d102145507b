"""Publishing a directory: it appears whole under its name, or not at all.

A directory is built beside its final name (`NAME.preparing`), flushed to the disk and renamed. One that
replaces an older one first moves that aside (`NAME.replaced`); when a kill falls between the two renames,
the next holder of the lock (`NAME.lock`) moves it back. The lock is the kernel's (flock) and ends with the
process that holds it, so whoever holds it may remove what killed processes left, and the lock's file in the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tiny_llm.config.errors import UserError


class BusyError(UserError):
    """Another process is preparing the same directory."""


def beside(directory: Path, ending: str) -> Path:
    return directory.with_name(f"{directory.name}.{ending}")


@contextlib.contextmanager
def locked(directory: Path, waiting: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the lock of a directory, clearing away what killed processes left.

    While another process holds it: wait after telling `waiting` so, or raise BusyError when that is None.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = beside(directory, "lock")
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(path.open("a+b", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{directory} is being prepared by process {_holder(file)}"
                if waiting is None:
                    raise BusyError(f"{message}; wait until it has ended") from None
                waiting(f"{message}; waiting until it has ended")
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                break  # else its holder removed it meanwhile, and another process may hold a new one
        stack.callback(path.unlink, missing_ok=True)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        _recover(directory)
        yield


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(32).decode(errors="replace").strip() or "unknown"


def _recover(directory: Path) -> None:
    replaced = beside(directory, "replaced")
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)
    for leftover in (replaced, beside(directory, "preparing")):
        if leftover.exists():
            shutil.rmtree(leftover)


@contextlib.contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Give an empty directory to fill, and publish it as `directory` unless the block raises."""
    staging = beside(directory, "preparing")
    staging.mkdir()
    try:
        yield staging
        _publish(staging, directory)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _recover(directory)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(directory)  # writing names no file
        raise


def _publish(staging: Path, directory: Path) -> None:
    for path in staging.rglob("*"):
        flush(path)
    flush(staging)
    if directory.exists():
        replaced = beside(directory, "replaced")
        directory.rename(replaced)
        staging.rename(directory)
        flush(directory.parent)
        shutil.rmtree(replaced)
    else:
        staging.rename(directory)
        flush(directory.parent)


def flush(path: Path) -> None:
    """Make a file's content, or a directory's entries, last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
