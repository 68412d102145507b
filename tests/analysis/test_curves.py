"""loss.png shows what metrics.jsonl says, for every kind of run and at every moment of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tiny_llm.analysis import curves
from tiny_llm.analysis.curves import condense, draw_run, plot_run, tokens_tick

PNG = b"\x89PNG\r\n\x1a\n"


def run_rows(
    updates: int = 40, workers: int = 1, gamma: float = 1.0, fast: bool = True
) -> list[dict[str, Any]]:
    """A run of `updates` train rows with a validation row every ten."""
    rows: list[dict[str, Any]] = []
    for update in range(1, updates + 1):
        loss = 4 + 5 * (math.exp(-update / 4) if fast else 1 - update / updates)
        common = {"update": update, "epoch": update / 10, "tokens": update * 1000}
        train = common | {"event": "train", "loss": loss, "lr": 0.01 * update / updates}
        if workers > 1:
            train |= {"local_losses": [loss + 0.1 * i for i in range(workers)], "mixing_gamma": gamma}
            train |= {"relative_consensus_error": 1e-3 * loss}
        rows.append(train)
        if update % 10 == 0:
            rows.append(common | {"event": "validation", "loss": loss + 0.1})
    rows.append(rows[-1] | {"event": "final_validation", "loss": 4.321})
    return rows


def texts(axis: Axes) -> str:
    return " | ".join(text.get_text() for text in axis.texts)


def names(figure: Figure) -> list[str]:
    return [axis.get_title(loc="left") or axis.get_title(loc="right") for axis in figure.axes]


def heights(axis: Axes) -> list[list[float]]:
    return [np.asarray(line.get_ydata()).tolist() for line in axis.lines]


def test_train_and_validation_losses_are_drawn_against_tokens() -> None:
    rows = run_rows()
    loss_panel = draw_run(rows, "run").axes[0]
    train, validation, final = loss_panel.lines
    assert heights(loss_panel)[0] == [row["loss"] for row in rows if row["event"] == "train"]
    assert np.asarray(train.get_xdata()).tolist() == [1000.0 * update for update in range(1, 41)]
    assert np.asarray(validation.get_xdata()).tolist() == [10_000, 20_000, 30_000, 40_000]
    assert validation.get_marker() == "o"
    assert heights(loss_panel)[2] == [4.321]
    assert final.get_markersize() > validation.get_markersize()


def test_curves_are_named_beside_their_ends_and_axes_have_units() -> None:
    figure = draw_run(run_rows(), "tiny on stdlib")
    assert texts(figure.axes[0]) == "train | final validation\n4.321 nats"
    assert names(figure)[:2] == ["loss (nats)", "learning rate"]
    assert figure.axes[1].get_xlabel() == "tokens"
    assert [text.get_text() for text in figure.texts] == ["tiny on stdlib"]


def test_before_the_end_the_last_validation_is_named() -> None:
    rows = [row for row in run_rows() if row["event"] != "final_validation"]
    assert "| validation\n4.100 nats" in texts(draw_run(rows, "run").axes[0])


def test_labels_do_not_overlap_where_curves_end_together() -> None:
    figure = draw_run(run_rows(workers=4), "run")
    figure.draw_without_rendering()
    lower, upper = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert lower.y1 <= upper.y0
    assert max(lower.x1, upper.x1) <= figure.bbox.x1


def test_a_decentralized_run_shows_the_workers_as_a_band_around_the_train_loss() -> None:
    rows = run_rows(workers=3)
    loss_panel = draw_run(rows, "run").axes[0]
    assert "train\n(3 workers)" in texts(loss_panel)
    band = np.asarray(loss_panel.collections[0].get_paths()[0].vertices)
    last = next(row for row in reversed(rows) if row["event"] == "train")
    at_the_end = [y for x, y in band if x == last["tokens"]]
    assert (min(at_the_end), max(at_the_end)) == (last["local_losses"][0], last["local_losses"][-1])


def test_a_decentralized_run_has_a_consensus_panel_with_gamma_on_the_other_side() -> None:
    figure = draw_run(run_rows(workers=4, gamma=0.5), "run")
    assert names(figure)[:4] == ["loss (nats)", "relative consensus error", "learning rate", "gamma"]
    consensus, gamma = figure.axes[1], figure.axes[3]
    assert consensus.get_yscale() == "log"
    assert heights(consensus)[0][-1] == pytest.approx(4e-3, rel=1e-3)
    assert heights(gamma) == [[0.5] * 40]


def test_a_gamma_that_is_always_one_is_not_drawn() -> None:
    assert "gamma" not in names(draw_run(run_rows(workers=4), "run"))


def test_a_synchronous_run_and_one_in_perpetual_consensus_have_no_consensus_panel() -> None:
    in_consensus = [row | {"relative_consensus_error": 0.0} for row in run_rows(workers=4)]
    for rows in (run_rows(), in_consensus):
        assert "relative consensus error" not in names(draw_run(rows, "run"))


def test_the_second_half_is_shown_closer_only_where_the_curve_leaves_room() -> None:
    assert names(draw_run(run_rows(), "run")) == ["loss (nats)", "learning rate"]
    with_room, without = draw_run(run_rows(), "run"), draw_run(run_rows(fast=False), "run")
    [close_up] = with_room.axes[0].child_axes
    assert isinstance(close_up, Axes)
    assert close_up.get_title(loc="left") == "the second half, closer"
    assert close_up.get_ylim()[1] < 5 < with_room.axes[0].get_ylim()[1]
    assert without.axes[0].child_axes == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        [],
        run_rows(1)[:1],
        run_rows(1, workers=4, gamma=0.5)[:1],
        [row for row in run_rows() if row["event"] == "train"],
        [row for row in run_rows() if row["event"] == "validation"],
        [row | {"lr": 0.0} for row in run_rows()],
        [row | {"loss": math.nan} if row["update"] % 7 == 0 else row for row in run_rows(workers=4)],
    ],
    ids=["no rows", "one", "one packed", "no validation", "no train", "rate 0", "NaN among the losses"],
)
def test_every_stage_of_a_run_gives_a_picture_without_a_warning(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    plot_run(rows, tmp_path / "loss.png", "run")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_numbers_that_are_not_finite_are_left_out_of_curves_and_labels() -> None:
    rows = run_rows()
    rows[0] = rows[0] | {"loss": None}
    rows[-1] = rows[-1] | {"loss": math.nan}
    loss_panel = draw_run(rows, "run").axes[0]
    assert heights(loss_panel)[0] == [row["loss"] for row in rows[1:] if row["event"] == "train"]
    assert "| validation\n4.100 nats" in texts(loss_panel)


def test_no_rows_are_called_so() -> None:
    assert texts(draw_run([], "run").axes[0]) == "no rows yet"


def test_a_long_run_is_drawn_from_means_that_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_POINTS", 4)
    rows = run_rows(38, workers=2)
    train = [row for row in condense(rows) if row["event"] == "train"]
    assert [row["rows"] for row in train] == [10, 10, 10, 8]
    assert [row["tokens"] for row in train] == [10_000, 20_000, 30_000, 38_000]
    losses = [row["local_losses"] for row in rows if row["event"] == "train"]
    assert train[1]["local_losses"] == pytest.approx(np.mean(losses[10:20], axis=0))
    assert train[1]["loss"] == pytest.approx(np.mean([local[0] for local in losses[10:20]]))
    assert len(condense(rows)) - len(train) == len(rows) - len(losses)
    assert "10-row means" in texts(draw_run(rows, "run").axes[0])


def test_a_metrics_file_gives_the_same_picture_as_its_rows_even_with_a_torn_last_line(tmp_path: Path) -> None:
    rows = run_rows(workers=2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "tra')
    plot_run(metrics, tmp_path / "from_file.png", "run")
    plot_run(rows, tmp_path / "from_rows.png", "run")
    assert (tmp_path / "from_file.png").read_bytes() == (tmp_path / "from_rows.png").read_bytes()


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "loss.png"
    plot_run(run_rows(), out, "run")
    before = out.read_bytes()

    def half_a_file(_: Figure, file: Any, **__: Any) -> None:
        file.write(PNG)
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", half_a_file)
    with pytest.raises(OSError, match="No space"):
        plot_run(run_rows(10), out, "run")
    assert out.read_bytes() == before


def test_nothing_is_left_beside_the_picture(tmp_path: Path) -> None:
    plot_run(run_rows(), tmp_path / "loss.png", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_importing_the_visible_parts_loads_neither_torch_nor_what_only_some_runs_use() -> None:
    script = """
import sys
import tiny_llm.analysis.curves, tiny_llm.training.progress, tiny_llm.training.tracking
print(sorted({"torch", "matplotlib", "rich", "tensorboard", "wandb"} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_drawing_leaves_pyplot_alone() -> None:
    script = """
import sys
from tiny_llm.analysis.curves import draw_run
draw_run([], "run")
print("matplotlib.pyplot" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


@pytest.mark.parametrize(
    ("tokens", "written"), [(0, "0"), (900, "900"), (500_000, "500k"), (2.5e6, "2.5M"), (1.2e9, "1.2B")]
)
def test_tokens_are_written_short_on_the_axis(tokens: float, written: str) -> None:
    assert tokens_tick(tokens) == written
