"""Runs of GPT-2 and Qwen3: packed and single, with dropout, killed and resumed, with samples of every epoch."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import assert_same_run, rows_of, send_at_row, start, status_of, train

from tiny_llm import sample
from tiny_llm.config.errors import UserError
from tiny_llm.training.saved_run import open_run

PROMPTS = ["def ", "a, 'b' and ünïcödé", ""]
PROMPTS_OVERRIDE = "evaluation.prompts=['def ','a, \\'b\\' and ünïcödé','']"
PACKED = ["decentralized=atc", "decentralized.num_models=2"]


TOKENS = ("training.tokens_per_parameter", "training.epoch_tokens_per_parameter", "model=tiny")


def overrides_of(preset: str, tiny_overrides: list[str], *more: str) -> list[str]:
    """The tiny run with another family's values, dropout, and its budget in updates."""
    base = [text for text in tiny_overrides if not text.startswith(TOKENS)]
    budget = ["training.updates=40", "training.epoch_updates=13"]
    return [f"model={preset}", *base, *budget, "model.dropout=0.2", *more]


@pytest.fixture(scope="module", params=["gpt2-small", "qwen3-v0"])
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packed(preset: str, tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / preset
    extra = ["training.checkpoint_policy=interval", PROMPTS_OVERRIDE, f"output_dir={run}"]
    train(*overrides_of(preset, tiny_overrides, *PACKED, *extra))
    return run


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_a_run_learns_and_tells_its_counts(packed: Path, preset: str) -> None:
    result = json.loads((packed / "result.json").read_text())
    assert rows_of(packed)[0]["loss"] > result["final_validation_loss"] + 0.2
    places = [result[f"{place}_parameters"] for place in ("embedding", "head", "core")]
    assert sum(places) == result["parameters"]
    assert places[1] == 512 * 32
    assert places[0] == (512 + 32 * (preset == "gpt2-small")) * 32
    assert [row["epoch"] for row in rows_of(packed) if row["event"] == "validation"] == [1, 2, 3, 4]
    assert [row["update"] for row in rows_of(packed) if row["event"] == "validation"] == [13, 26, 39, 40]


def test_each_epoch_has_a_sample_of_each_prompt(packed: Path) -> None:
    rows = samples_of(packed)
    assert [(row["epoch"], row["prompt"]) for row in rows] == [(e, p) for e in (1, 2, 3, 4) for p in PROMPTS]
    assert all(
        row["text"].startswith(row["prompt"]) and len(row["text"]) > len(row["prompt"]) for row in rows
    )
    assert {row["update"] for row in rows} == {13, 26, 39, 40}
    assert rows[0] | {"text": ""} == {
        "epoch": 1, "update": 13, "tokens": 13 * 512, "prompt": "def ", "text": "", "temperature": 0.8,
        "top_k": 50, "top_p": None, "max_new_tokens": 64, "seed": 12345,
    }  # fmt: skip


def test_a_signal_and_a_kill_change_no_bit_and_repeat_no_sample(
    packed: Path, preset: str, tiny_overrides: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    often = ["training.recovery_minutes=0.002", "training.checkpoint_policy=interval", PROMPTS_OVERRIDE]
    first = start(*overrides_of(preset, tiny_overrides, *PACKED, *often, f"output_dir={run}"))
    assert send_at_row(first, run, 4, signal.SIGTERM) == 128 + signal.SIGTERM
    send_at_row(start(f"resume={run}"), run, 7, signal.SIGKILL)
    train(f"resume={run}")
    assert_same_run(run, packed)
    assert samples_of(run) == samples_of(packed)


def test_samples_past_a_checkpoint_are_cut_off(packed: Path, tmp_path: Path) -> None:
    train(f"resume={packed}/epoch-002.pt", f"output_dir={tmp_path / 'on'}")
    shutil.copytree(packed, tmp_path / "same")
    for name in ("final.pt", "result.json", "epoch-003.pt", "epoch-004.pt"):
        (tmp_path / "same" / name).unlink()
    train(f"resume={tmp_path / 'same'}")
    for run in (tmp_path / "on", tmp_path / "same"):
        assert_same_run(run, packed)
        assert samples_of(run) == samples_of(packed)


def test_looped_and_batched_workers_train_the_same_model(
    packed: Path, preset: str, tiny_overrides: list[str], tmp_path: Path
) -> None:
    train(
        *overrides_of(
            preset,
            tiny_overrides,
            *PACKED,
            f"output_dir={tmp_path / 'run'}",
            "decentralized.execution=batched",
        )
    )
    batched, looped = (torch.load(run / "final.pt", weights_only=True) for run in (tmp_path / "run", packed))
    assert (batched["parameters"] - looped["parameters"]).abs().max() < 1e-4
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_a_single_model_accumulates_micro_batches_and_evaluates_without_dropout(
    preset: str, tiny_overrides: list[str], tmp_path: Path
) -> None:
    base = overrides_of(preset, [text for text in tiny_overrides if "micro_batch" not in text])
    train(*base, "training.micro_batch_size=4", f"output_dir={tmp_path / 'run'}")
    assert status_of(tmp_path / "run") == "complete"
    from tiny_llm.training.evaluation import Evaluator

    saved = open_run(str(tmp_path / "run"), None, "cpu")
    losses = [Evaluator(saved.config, saved.cache, saved.device).full(saved.weights).loss for _ in range(2)]
    assert losses[0] == losses[1] == rows_of(tmp_path / "run")[-1]["loss"]


@pytest.fixture
def door(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., tuple[str, str, object]]:
    """The sample door on the packed run: what it prints on stdout and stderr, and its exit code."""

    def call(*words: str) -> tuple[str, str, object]:
        monkeypatch.setattr(sys, "argv", ["sample", f"run={packed}", "max_new_tokens=40", *words])
        capfdbinary.readouterr()
        code: object = 0
        try:
            sample.main()
        except SystemExit as exit_:
            code = exit_.code
        printed, error = capfdbinary.readouterr()
        return printed.decode("utf-8", "strict"), error.decode(), code

    return call


def test_several_prompts_and_samples_are_each_shown_as_alone(
    door: Callable[..., tuple[str, str, object]],
) -> None:
    together = door("prompts=['def f', import]", "num_samples=2", "seed=5")[0]
    alone = {
        (prompt, sample_): door(f"prompt={prompt}", f"seed={5 + sample_}")[0]
        for prompt in ("def f", "import")
        for sample_ in (0, 1)
    }
    expected = "".join(
        f"--- prompt {p + 1}, sample {s + 1}\n{alone[prompt, s]}"
        for p, prompt in enumerate(("def f", "import"))
        for s in (0, 1)
    )
    assert together == expected
    assert len(set(alone.values())) == 4


def test_a_small_nucleus_is_greedy(door: Callable[..., tuple[str, str, object]]) -> None:
    greedy = door("prompt=def", "temperature=0")[0]
    assert door("prompt=def", "top_p=1e-9", "seed=3")[0] == greedy
    assert door("prompt=def", "top_k=1", "seed=4")[0] == greedy
    assert door("prompt=def", "top_k=null", "temperature=2")[0] != greedy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either prompt=TEXT or prompts=[TEXT, TEXT]"),
        (["prompt=a", "prompts=[b]"], "either prompt=TEXT or prompts=[TEXT, TEXT]"),
        (
            ["prompt=a", "seed=99999999999999999999999"],
            "seed=99999999999999999999999: expected an integer >= 0",
        ),
        (["prompt=a", "top_p=0"], "top_p=0: expected a number > 0 and <= 1"),
        (["prompt=a", "num_samples=0"], "num_samples=0"),
    ],
)
def test_mistakes_at_the_door_are_one_line(
    door: Callable[..., tuple[str, str, object]], words: list[str], message: str
) -> None:
    printed, error, code = door(*words)
    assert (printed, error.count("\n"), code) == ("", 1, 2)
    assert message in error


def test_a_lost_samples_file_is_named(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "run")
    for name in ("final.pt", "result.json"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "samples.jsonl").write_text("")
    with pytest.raises(UserError, match=r"samples\.jsonl has 0 bytes, but had"):
        train(f"resume={tmp_path / 'run'}")
