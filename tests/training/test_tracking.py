"""Trackers mirror metrics.jsonl; they are checked before a training and never stop one."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tiny_llm.config.errors import UserError
from tiny_llm.training.tracking import Kind, open_tracker, require_package

TRAIN = {
    "event": "train", "update": 1, "epoch": 0.5, "tokens": 512, "loss": 8.25, "lr": 0.003, "grad_norm": None,
    "local_losses": [8.0, 8.5, 8.75], "mixing_gamma": 1,
}  # fmt: skip
VALIDATION = {"event": "validation", "update": 1, "epoch": 1, "tokens": 512, "loss": 7.5, "targets": 100}


def read_events(run_directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_directory / "tensorboard"))
    events.Reload()
    return events


def curve(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events.Scalars(name)]


class StubRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}
        self.finished = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[StubRun]:
    """Stand a stub in the place of wandb; return the runs that it started."""
    runs: list[StubRun] = []

    def init(**settings: Any) -> StubRun:
        runs.append(StubRun(settings))
        return runs[-1]

    stub = types.ModuleType("wandb")
    stub.__dict__.update(init=init, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def test_tensorboard_reads_back_the_scalars_that_were_logged(tmp_path: Path) -> None:
    tracker = open_tracker("tensorboard", tmp_path, {"optimizer": {"lr": 1e-4}}, "run", 0)
    tracker.log(TRAIN)
    tracker.log(TRAIN | {"update": 2, "loss": 8.0})
    tracker.log(VALIDATION)
    tracker.close()
    events = read_events(tmp_path)
    assert curve(events, "train/loss") == [(1, 8.25), (2, 8.0)]
    assert curve(events, "validation/loss") == [(1, 7.5)]
    assert curve(events, "train/lr")[0][1] == pytest.approx(0.003)
    assert "train/update" not in events.Tags()["scalars"]


def test_a_list_becomes_the_least_mean_and_largest_of_the_workers(tmp_path: Path) -> None:
    tracker = open_tracker("tensorboard", tmp_path, {}, "run", 0)
    tracker.log(TRAIN)
    tracker.close()
    events = read_events(tmp_path)
    spread = [curve(events, f"train/local_losses/{name}")[0][1] for name in ("min", "mean", "max")]
    assert spread == pytest.approx([8.0, 25.25 / 3, 8.75])
    assert not any("grad_norm" in name for name in events.Tags()["scalars"])


def test_tensorboard_shows_the_config_beside_the_curves(tmp_path: Path) -> None:
    open_tracker("tensorboard", tmp_path, {"optimizer": {"lr": 1e-4}}, "run", 0).close()
    events = read_events(tmp_path)
    [text] = events.Tensors("config")
    assert b'"lr": 0.0001' in text.tensor_proto.string_val[0]


def test_after_a_resume_tensorboard_drops_what_was_logged_past_the_checkpoint(tmp_path: Path) -> None:
    first = open_tracker("tensorboard", tmp_path, {}, "run", 0)
    for update in range(1, 6):
        first.log(TRAIN | {"update": update, "loss": 1.0})
    first.close()
    second = open_tracker("tensorboard", tmp_path, {}, "run", 3)
    second.log(TRAIN | {"update": 4, "loss": 2.0})
    second.close()
    assert curve(read_events(tmp_path), "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_wandb_gets_the_rows_against_the_update(tmp_path: Path, wandb_runs: list[StubRun]) -> None:
    tracker = open_tracker("wandb", tmp_path, {"seed": 42}, "my run", 0)
    tracker.log(TRAIN)
    tracker.log(VALIDATION)
    tracker.close()
    [run] = wandb_runs
    assert run.settings["name"] == "my run"
    assert run.settings["config"] == {"seed": 42}
    assert run.settings["dir"] == str(tmp_path)
    assert run.rows[0]["update"] == 1
    assert run.rows[0]["train/loss"] == 8.25
    assert run.rows[1] == {
        "update": 1, "validation/epoch": 1, "validation/tokens": 512, "validation/loss": 7.5,
        "validation/targets": 100,
    }  # fmt: skip
    assert run.axes == {"update": None, "*": "update"}


def test_closing_twice_finishes_the_wandb_run_once(tmp_path: Path, wandb_runs: list[StubRun]) -> None:
    tracker = open_tracker("wandb", tmp_path, {}, "run", 0)
    tracker.close()
    tracker.close()
    assert wandb_runs[0].finished == 1


def test_wandb_continues_the_same_run_after_a_resume(tmp_path: Path, wandb_runs: list[StubRun]) -> None:
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        open_tracker("wandb", tmp_path / folder, {}, "run", 0).close()
    first, resumed, other = (run.settings["id"] for run in wandb_runs)
    assert first == resumed != other
    assert {run.settings["resume"] for run in wandb_runs} == {"allow"}


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    real_import = builtins.__import__

    def import_without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == kind:
            raise ImportError(f"No module named '{kind}'")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_without)
    for attempt in (lambda: require_package(kind), lambda: open_tracker(kind, tmp_path, {}, "run", 0)):
        with pytest.raises(UserError) as caught:
            attempt()
        assert f"pip install 'tiny-llm[{kind}]'" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_named_wandb_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="pip install"):
        require_package("wandb")
    sys.modules.pop("wandb", None)


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failing_tracker_warns_once_and_never_stops_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_runs: list[StubRun], broken: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no network.\nTry later.")

    monkeypatch.setattr(sys.modules["wandb"] if broken == "init" else StubRun, broken, fail)
    warnings: list[str] = []
    tracker = open_tracker("wandb", tmp_path, {}, "run", 0, warn=warnings.append)
    tracker.log(TRAIN)
    tracker.log(TRAIN)
    tracker.close()
    tracker.close()
    assert warnings == [
        "tracking=wandb stopped: no network. Try later; training goes on, metrics.jsonl has every row"
    ]


def test_tensorboard_that_cannot_write_warns_instead_of_failing(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder belongs")
    warnings: list[str] = []
    tracker = open_tracker("tensorboard", tmp_path, {}, "run", 0, warn=warnings.append)
    tracker.log(TRAIN)
    tracker.close()
    assert len(warnings) == 1
    assert warnings[0].startswith("tracking=tensorboard stopped: ")


def test_without_a_tracker_nothing_is_imported_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = open_tracker("none", tmp_path, {}, "run", 0)
    tracker.log(TRAIN)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_the_rows_are_left_as_they_were(tmp_path: Path, wandb_runs: list[StubRun]) -> None:
    row: Mapping[str, Any] = types.MappingProxyType(dict(TRAIN))
    tracker = open_tracker("wandb", tmp_path, {}, "run", 0)
    tracker.log(row)
    assert wandb_runs[0].rows
    assert row == TRAIN
