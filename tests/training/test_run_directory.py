"""A run's directory: one run, one process, nothing lost when the disk is full, nothing secret in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import assert_same_run, rows_of, start, status_of, train, wait_until_running

from tiny_llm import evaluate, sample
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import UserError
from tiny_llm.training.engine import Engine
from tiny_llm.training.loop import Trainer
from tiny_llm.training.run_directory import Rows


def test_a_directory_with_a_run_is_refused(tiny_overrides: list[str], tmp_path: Path) -> None:
    train(*tiny_overrides, f"output_dir={tmp_path / 'run'}")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match="already holds a run; continue it with resume="):
        train(*tiny_overrides, f"output_dir={tmp_path / 'run'}")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_second_process_is_kept_out_while_the_first_lives(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    longer = [*tiny_overrides, "training.tokens_per_parameter=50", "data.max_passes=9", f"output_dir={run}"]
    first = start(*longer)
    wait_until_running(first, run)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match="in use by another process"):
            train(f"resume={run}")
    finally:
        first.kill()
        first.join()
    with pytest.raises(UserError, match="holds no training state"):
        train(f"resume={run}")  # the lock is free again; nothing had been saved


def test_nothing_of_the_process_environment_is_written(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    train(*tiny_overrides, f"output_dir={tmp_path / 'run'}")
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"verysecret" in p.read_bytes()]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"][0]
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert environment["seeds"]["runtime.seed"] == 42
    assert len(environment["identities"]["recipe"]) == 64


@pytest.mark.parametrize("scheme", ["off", "awc"])
def test_a_nan_stops_the_run_before_anything_moves(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    plain_gradients = Engine._accumulate_gradients

    def poisoned(engine: Engine, *arguments: object) -> torch.Tensor:
        losses = plain_gradients(engine, *arguments)  # type: ignore[arg-type]
        if engine.optimizer.updates == 9:
            engine.model.gradient_storage[-1, 100] = float("nan")
        return losses

    monkeypatch.setattr(Engine, "_accumulate_gradients", poisoned)
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"update 10: .*nothing was mixed or updated"):
        train(*tiny_overrides, f"decentralized={scheme}", f"output_dir={run}")
    assert status_of(run) == "failed"
    assert "update 10" in json.loads((run / "status.json").read_text())["error"]


@pytest.mark.parametrize("policy", ["none", "final", "interval", "explicit"])
def test_checkpoint_policies_keep_what_they_say(
    tiny_overrides: list[str], tmp_path: Path, policy: str
) -> None:
    epochs = {"interval": "2", "explicit": "[1,4]"}.get(policy, "1")
    run = tmp_path / "run"
    train(
        *tiny_overrides,
        f"training.checkpoint_policy={policy}",
        f"training.checkpoint_epochs={epochs}",
        "training.save_epoch_training_state=false",
        f"output_dir={run}",
    )
    kept = sorted(path.name for path in run.iterdir() if path.suffix in (".pt", ".safetensors"))
    weights = {"interval": [2, 4], "explicit": [1, 4]}.get(policy, [])
    final = [] if policy == "none" else ["final.pt"]
    assert kept == [*(f"epoch-{epoch:03d}.safetensors" for epoch in weights), *final]
    best = json.loads((run / "best.json").read_text())
    losses = [row["loss"] for row in rows_of(run) if row["event"] == "validation"]
    assert (best["loss"], best["epoch"]) == (min(losses), 1 + int(np.argmin(losses)))
    assert best["weights"] == (f"epoch-{best['epoch']:03d}.safetensors" if best["epoch"] in weights else None)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a tmpfs of a few kilobytes; skip where that is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free; `filler` holds them."""
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 1024)


def after_updates(monkeypatch: pytest.MonkeyPatch, acts: dict[int, Callable[[], None]]) -> None:
    """Have something done after some updates of what trains next."""
    advance = Trainer.advance

    def advance_and_act(trainer: Trainer, stream: Any) -> None:
        advance(trainer, stream)
        acts.get(trainer.update, lambda: None)()

    monkeypatch.setattr(Trainer, "advance", advance_and_act)


def test_a_full_disk_keeps_the_previous_checkpoint_and_says_so(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 1024) as disk:
        run = disk / "run"
        policy = ["training.checkpoint_policy=interval", f"output_dir={run}"]
        with pytest.raises(UserError, match=r"could not be saved: the disk is full; .*kept"):
            train(*tiny_overrides, *policy)
        assert (run / "epoch-001.pt").exists()
        assert not list(run.rglob("*.tmp"))
        train(f"resume={run}", "training.checkpoint_policy=final", f"output_dir={tmp_path / 'elsewhere'}")
    assert status_of(tmp_path / "elsewhere") == "complete"


def test_rows_wait_for_space_on_a_full_disk_and_stay_whole(tmp_path: Path) -> None:
    warnings: list[str] = []
    with small_disk(tmp_path / "disk", 64) as disk:
        rows = Rows(disk / "rows.jsonl")
        rows.append([{"update": 0}], warnings.append)
        fill(disk)
        long = "y" * 5000  # more than is left of the page that the first row began
        for update in (1, 2, 3):
            rows.append([{"update": update, "long": long}], warnings.append)
            assert rows_of(disk, "rows.jsonl") == [{"update": 0}]
        with pytest.raises(OSError, match=r"No space left on device: .*rows\.jsonl"):
            rows.synced_bytes()
        assert warnings == [
            f"warning: {disk / 'rows.jsonl'}: the disk is full; rows wait in memory until there is space"
        ]
        (disk / "filler").unlink()
        rows.append([{"update": 4}], warnings.append)
        assert [row["update"] for row in rows_of(disk, "rows.jsonl")] == [0, 1, 2, 3, 4]
        assert rows.synced_bytes() == (disk / "rows.jsonl").stat().st_size
        rows.close()
    assert len(warnings) == 1


def test_a_disk_that_fills_up_during_a_run_is_told_in_one_line_and_in_its_status(
    tiny_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        after_updates(monkeypatch, {1: lambda: fill(disk)})
        run = disk / "run"
        with pytest.raises(SystemExit, match="2"), user_errors_in_one_line():
            train(*tiny_overrides, "training.recovery_minutes=0.0001", f"output_dir={run}")
        printed = capsys.readouterr()
        unwritten = f"{run / 'metrics.jsonl'}, which a checkpoint goes with: the disk is full; free space"
        assert "metrics.jsonl: the disk is full; rows wait in memory" in printed.out
        assert f"warning: {unwritten}" in printed.out
        assert printed.err == f"error: {unwritten}\n"
        assert status_of(run) == "failed"
        assert unwritten in json.loads((run / "status.json").read_text())["error"]


def test_a_disk_that_was_full_for_a_while_leaves_no_trace(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_overrides = [*tiny_overrides, "evaluation.prompts=[import]"]
    train(*tiny_overrides, f"output_dir={tmp_path / 'free'}")
    with small_disk(tmp_path / "disk", 1024) as disk:
        after_updates(monkeypatch, {8: lambda: fill(disk), 48: (disk / "filler").unlink})
        train(*tiny_overrides, f"output_dir={disk / 'run'}")
        assert status_of(disk / "run") == "complete"
        assert_same_run(disk / "run", tmp_path / "free")
        assert rows_of(disk / "run", "samples.jsonl") == rows_of(tmp_path / "free", "samples.jsonl") != []


def test_a_run_that_is_alive_is_not_called_one_to_remove(tiny_overrides: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        *tiny_overrides, "training.tokens_per_parameter=50", "data.max_passes=99", f"output_dir={run}"
    )
    wait_until_running(process, run)
    with pytest.raises(UserError, match="in use by another process"):
        train(*tiny_overrides, f"output_dir={run}")
    process.kill()
    process.join()
    with pytest.raises(UserError, match="it kept no state to continue: remove it"):
        train(*tiny_overrides, f"output_dir={run}")


def test_a_full_disk_at_a_recovery_checkpoint_stops_nothing(
    tiny_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 1024) as disk:
        run = disk / "run"
        train(
            *tiny_overrides,
            "training.recovery_minutes=0.001",
            "training.checkpoint_policy=none",
            f"output_dir={run}",
        )
        (disk / "filler").write_bytes(b"x" * (2**20 - sum(p.stat().st_size for p in run.iterdir()) - 60_000))
        other = disk / "other"
        recovery = [
            "training.recovery_minutes=0.001",
            "training.checkpoint_policy=none",
            f"output_dir={other}",
        ]
        with contextlib.suppress(OSError):  # the picture and the result may not fit either
            train(*tiny_overrides, *recovery)
    assert "recovery.pt could not be saved: the disk is full" in capsys.readouterr().out


def test_doors_answer_a_saved_run_and_refuse_nonsense(
    tiny_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    train(*tiny_overrides, "decentralized=atc", "training.checkpoint_policy=interval", f"output_dir={run}")

    def door(name: str, *words: str) -> tuple[str, str, object]:
        """Return what a door prints on stdout and on stderr, and its exit code."""
        monkeypatch.setattr(sys, "argv", [name, *words])
        capsys.readouterr()
        code: object = 0
        try:
            {"evaluate": evaluate.main, "sample": sample.main}[name]()
        except SystemExit as exit_:
            code = exit_.code
        return (*capsys.readouterr(), code)

    final = next(row for row in rows_of(run) if row["event"] == "final_validation")
    full = json.loads(door("evaluate", f"run={run}", "full=true")[0])
    assert full == {
        "checkpoint": "final.pt",
        "split": "full",
        "loss": final["loss"],
        "targets": final["targets"],
    }
    for name in ("epoch-002.safetensors", "epoch-002.pt", "node-001/epoch-002.pt"):
        answer = json.loads(door("evaluate", f"run={run}", f"checkpoint={name}")[0])
        epoch = next(row for row in rows_of(run) if row["event"] == "validation" and row["epoch"] == 2)
        assert (answer["loss"] == epoch["loss"]) == (not name.startswith("node")), name
    prompt = "import ünïcödé"
    texts = [
        door("sample", f"run={run}", f"prompt={prompt}", "max_new_tokens=30", *more)[0]
        for more in ([], [], ["seed=1"], ["temperature=0"], ["temperature=0", "seed=5"])
    ]
    assert all(text.startswith(prompt) for text in texts)
    assert (texts[0] == texts[1], texts[0] == texts[2], texts[3] == texts[4]) == (True, False, True)
    for words in (
        ["evaluate", "run=nowhere"],
        ["evaluate", f"run={run}", "checkpoint=nothing.pt"],
        ["evaluate", f"run={run}", "fool=true"],
        ["sample", f"run={run}"],
        ["sample", f"run={run}", "prompt=x", "temperature=-1"],
    ):
        printed, error, code = door(*words)
        assert (printed, error.count("\n"), code) == ("", 1, 2), (words, error)
