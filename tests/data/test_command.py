"""Commands in error messages can be pasted: composed again they give the settings that were meant."""

from __future__ import annotations

import importlib.machinery
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from small_cache import stdlib_settings, text_settings

from tiny_llm.config.compose import compose
from tiny_llm.config.schema import DataConfig
from tiny_llm.data.command import door_command, prepare_command, remove_command


def composed(command: str) -> DataConfig:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "tiny_llm.prepare"]
    return compose(words[3:]).config().data


@pytest.mark.parametrize(
    "path",
    [
        "plain.txt",
        "a b,c.txt",
        "it's [1]/{x}*.txt",
        "käse=1/**/$y.txt",
        "back\\slash",
        "true",
        "12",
        "1e3",
        "",
        "NULL",
    ],
)
def test_the_command_gives_the_same_settings(tmp_path: Path, path: str) -> None:
    data = text_settings(
        tmp_path, path, "second.jsonl", separator="", prefetch=False, cache_dir="a dir/cache"
    )
    assert composed(prepare_command(data)) == data


def test_changes_replace_settings(tmp_path: Path) -> None:
    data = stdlib_settings(tmp_path)
    changed = composed(prepare_command(data, cache_dir="else where", max_passes=7))
    assert (changed.cache_dir, changed.max_passes, changed.shuffle_seed) == ("else where", 7, 1)


def test_defaults_need_no_mention() -> None:
    data = compose(["data=c4"]).config().data
    assert prepare_command(data) == "python -m tiny_llm.prepare data=c4"


def as_door(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    specification: Any = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", specification)
    monkeypatch.setattr(sys, "argv", ["door.py", *arguments])


def test_behind_a_door_the_command_repeats_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_door(
        monkeypatch,
        "tiny_llm.train",
        "model=20m",
        "data=c4",
        "data.max_passes=2",
        "training.batch_tokens=8192",
    )
    data = stdlib_settings(tmp_path)
    typed = "model=20m data=c4 data.max_passes=2 training.batch_tokens=8192"
    assert prepare_command(data) == f"python -m tiny_llm.prepare {typed}"
    assert door_command("train", data, max_passes=5) == (
        "python -m tiny_llm.train model=20m data=c4 training.batch_tokens=8192 data.max_passes=5"
    )


@pytest.mark.parametrize(
    ("door", "typed"), [("tiny_llm.train", "resume=outputs/x"), ("tiny_llm.evaluate", "run=outputs/x")]
)
def test_what_was_typed_is_not_repeated_where_it_composes_another_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, typed: str
) -> None:
    as_door(monkeypatch, door, typed)
    assert composed(prepare_command(stdlib_settings(tmp_path))) == stdlib_settings(tmp_path)


def test_directories_with_spaces_survive_the_shell() -> None:
    assert shlex.split(remove_command(Path("/a b/c"))) == ["rm", "-r", "/a b/c"]
