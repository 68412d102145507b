"""One point of a sweep in its own process: `python -m tiny_llm.sweeps.job DIRECTORY`.

The directory's composed.yaml says what to run, the rest of the directory how: nothing when it is complete,
from its newest whole state when there is one, else from the start, with the rows of the lost attempt moved
aside. An error is in status.json afterwards even when it came before the run itself had begun.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from tiny_llm import files
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.placement import find_placement, quieten_torch
from tiny_llm.config.plan import make_plan
from tiny_llm.config.saved import read_yaml
from tiny_llm.sweeps.sweep import COMPOSED
from tiny_llm.training.resume import continuation
from tiny_llm.training.run_directory import RunDirectory

PR_SET_PDEATHSIG = 1


def run_point(path: Path) -> None:
    """Start, resume or leave alone the run in `path`. Ends as `training.start.run` does."""
    directory = RunDirectory(path)
    try:
        config = read_yaml(directory / COMPOSED)
        if directory.status == "complete" and (directory / "result.json").exists():
            print(f"{path} is complete; nothing is left to do")
            return
        placement = find_placement()
        resume = continuation(path, config, placement.world) if directory.holds_run else None
        if placement.world > 1:
            quieten_torch()
        from tiny_llm.training.start import run

        run(make_plan(resume.config if resume else config, placement.world), resume, placement, again=True)
    except Exception as error:
        _note_failure(directory, error)
        raise


def _note_failure(directory: RunDirectory, error: Exception) -> None:
    """Leave the error in status.json, unless the run has put it there or another process is at work."""
    text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception), directory.locked():
        path = directory / "status.json"
        stated = files.read_json(path) if path.exists() else {}
        if (stated.get("status"), stated.get("error")) != ("failed", text):
            directory.set_status("failed", error=text)


def die_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the launcher dies, so that no run outlives it unwatched (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one point of a sweep from its directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parent", type=int, help="end with this process, which must be the parent")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with(arguments.parent)
    with user_errors_in_one_line():
        run_point(arguments.directory)


if __name__ == "__main__":
    main()
