"""The source that a sweep notes: what was committed, and what was not."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tiny_llm.sweeps.source import Source, read_source


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", root, *who, *words], capture_output=True, text=True, check=True
    ).stdout


def checkout(root: Path) -> Path:
    (root / "tiny_llm").mkdir()
    (root / "tiny_llm" / "train.py").write_text("old = 1\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "x")
    return root


def test_a_clean_checkout_is_its_commit(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "notes.txt").write_text("nothing that runs")
    assert read_source(root) == Source(git(root, "rev-parse", "HEAD").strip(), "")


def test_the_diff_makes_the_running_source_out_of_the_commit(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "tiny_llm" / "train.py").write_text("new = 2\n")
    (root / "tiny_llm" / "added.py").write_text("added = 3\n")
    before = git(root, "status", "--porcelain")
    source = read_source(root)
    assert git(root, "status", "--porcelain") == before, "the user's index is left alone"
    git(root, "stash", "--include-untracked")
    subprocess.run(["git", "-C", root, "apply"], input=source.diff, text=True, check=True)
    assert (root / "tiny_llm" / "train.py").read_text() == "new = 2\n"
    assert (root / "tiny_llm" / "added.py").read_text() == "added = 3\n"


def test_outside_a_checkout_nothing_is_claimed(tmp_path: Path) -> None:
    assert read_source(tmp_path) == Source(None, "")
