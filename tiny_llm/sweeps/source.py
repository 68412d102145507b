"""Which source a sweep runs: the git commit, and the difference from it when the checkout was changed.

Only what decides a run counts (the package, its configs, its dependencies), new files included; notes and
outputs that lie around make nothing dirty. Outside a checkout everything is null.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tiny_llm

WATCHED = ("tiny_llm", "conf", "launchers", "pyproject.toml", "constraints.txt")


@dataclass(frozen=True)
class Source:
    """A commit and the diff that leads from it to what runs; the diff is empty for a clean checkout."""

    commit: str | None
    diff: str


def read_source(root: Path | None = None) -> Source:
    """Return the source of the checkout at `root` (None: the one that this code is imported from)."""
    root = root or Path(tiny_llm.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return Source(None, "")
    try:
        return Source(_git(root, "rev-parse", "HEAD").strip(), _difference(root))
    except (OSError, subprocess.SubprocessError):
        return Source(None, "")


def _difference(root: Path) -> str:
    """Return the diff to HEAD with new files, through a copy of the index so that the user's stays as it is."""
    watched = [name for name in WATCHED if (root / name).exists()]
    index = Path(_git(root, "rev-parse", "--git-path", "index").strip())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "index")
        shutil.copyfile(root / index, copy)
        _git(root, "add", "--intent-to-add", "--", *watched, index=copy)
        return _git(root, "diff", "--binary", "HEAD", "--", *watched, index=copy)


def _git(root: Path, *words: str, index: Path | None = None) -> str:
    environment = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    done = subprocess.run(
        ["git", "-C", str(root), *words],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=True,
        env=environment,
    )
    return done.stdout
