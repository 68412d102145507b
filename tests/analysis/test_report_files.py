"""The table, report.csv, report.json, report.md and report.png say the same, whole, and can be read back."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tiny_llm.analysis.choice import baselines
from tiny_llm.analysis.groups import Report, make_report
from tiny_llm.analysis.key_panels import nearest_groups
from tiny_llm.analysis.paired import Difference, difference
from tiny_llm.analysis.report_console import show
from tiny_llm.analysis.report_files import write_csv, write_json, write_markdown
from tiny_llm.analysis.runs import CONSENSUS, HOURS, LOSS, METRICS, SPEED, RunRecord
from tiny_llm.analysis.sweep_plot import draw_report, group_colors, mean_curve, plot_report, spread_apart
from tiny_llm.analysis.tables import group_table, headline

LOSSES = {("awc", "ring"): 4.1, ("awc", "complete"): 4.0, ("atc", "ring"): 4.3, ("atc", "complete"): 4.2}
SEEDS = (1, 2, 3)


def record(seed: int, loss: float, name: str = "run", status: str = "complete", **settings: Any) -> RunRecord:
    metrics = {LOSS: loss, SPEED: 12_345.6 + seed, HOURS: 0.5 + seed / 100, CONSENSUS: 1e-3 * seed}
    return RunRecord(
        Path(f"sweep/{name}-{seed}"),
        status,
        {key.replace("__", "."): value for key, value in settings.items()} | {"data.name": "c4"},
        seed,
        metrics=metrics if status == "complete" else {},
        curve={tokens: loss + 1000 / tokens for tokens in range(100, 1001, 100)},
        parameters=20_403_520,
    )


def runs(losses: dict[tuple[str, str], float] = LOSSES, seeds: Sequence[int] = SEEDS) -> list[RunRecord]:
    return [
        record(seed, loss + seed / 100, decentralized__scheme=scheme, topology__name=topology)
        for (scheme, topology), loss in losses.items()
        for seed in seeds
    ]


def left_out() -> list[RunRecord]:
    said = {"update": 120, "updates": 400, "loss": 5.25, "reason": "ValueError: worker 3 | loss nan"}
    failed = RunRecord(Path("sweep/bad"), "failed", {"decentralized.scheme": "awc"}, 4, **said)
    return [failed, RunRecord(Path("sweep/late"), "waiting", reason="it has not begun")]


@pytest.fixture
def report() -> Report:
    return make_report([*runs(), *left_out()])


@pytest.fixture
def against(report: Report) -> dict[int, Difference]:
    bases = baselines(report, "topology=complete")
    return {number: difference(report.groups[number - 1], base) for number, base in bases.items()}


def unrounded(text: str) -> float | None:
    return float(text) if text else None


def test_the_csv_gives_back_every_number_unrounded(
    tmp_path: Path, report: Report, against: dict[int, Difference]
) -> None:
    write_csv(tmp_path / "report.csv", report, against)
    with open(tmp_path / "report.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["topology.name"] for row in rows] == ["complete", "ring", "complete", "ring"]
    for row, group in zip(rows, report.groups, strict=True):
        assert int(row["rank"]) == group.number
        assert row["seeds"] == "1 2 3"
        for name in METRICS:
            for part in ("mean", "sd", "n", "best"):
                assert unrounded(row[f"{name}_{part}"]) == getattr(group.statistics[name], part)
        found = against[group.number]
        assert (int(row["baseline"]), float(row["minus_baseline"])) == (found.other, found.mean)


def test_the_csv_leaves_empty_what_is_not_there(tmp_path: Path) -> None:
    one = record(1, 4.0, schedule__decay_fraction=0.1, optimizer__grad_clip=None)
    other = record(1, 4.1, optimizer__grad_clip=1.0)
    third = record(1, 4.2, schedule__decay_fraction=0.2, optimizer__grad_clip=1.0)
    write_csv(tmp_path / "report.csv", make_report([one, other, third]), None)
    with open(tmp_path / "report.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["schedule.decay_fraction"] for row in rows] == ["0.1", "", "0.2"]
    assert [row["optimizer.grad_clip"] for row in rows] == ["null", "1", "1"]
    assert rows[0]["final_validation_loss_sd"] == ""
    assert "minus_baseline" not in rows[0]


def test_the_json_gives_back_groups_runs_and_what_was_left_out(
    tmp_path: Path, report: Report, against: dict[int, Difference]
) -> None:
    compared = difference(report.groups[1], report.groups[0])
    write_json(tmp_path / "report.json", report, against, compared, {"command": "python"})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert (value["command"], value["varying"]) == ("python", ["decentralized.scheme", "topology.name"])
    assert value["shared"] == {"data.name": "c4"}
    assert [group["settings"]["topology.name"] for group in value["groups"]] == ["complete", "ring"] * 2
    first = value["groups"][0]
    assert first[LOSS] == {
        "mean": np.mean([4.01, 4.02, 4.03]),
        "sd": pytest.approx(0.01),
        "n": 3,
        "best": 4.01,
    }
    assert [(run["seed"], run[LOSS]) for run in first["runs"]] == [(1, 4.01), (2, 4.02), (3, 4.03)]
    assert value["groups"][1]["minus_baseline"]["mean"] == pytest.approx(0.1)
    assert value["comparison"]["mean"] == pytest.approx(0.1)
    assert value["comparison"]["seeds"] == [1, 2, 3]
    assert [(run["status"], run["update"]) for run in value["left_out"]] == [
        ("failed", 120),
        ("waiting", None),
    ]


def test_the_markdown_holds_the_table_and_the_errors(
    tmp_path: Path, report: Report, against: dict[int, Difference]
) -> None:
    compared = difference(report.groups[1], report.groups[0])
    write_markdown(
        tmp_path / "report.md", report, against, compared, "python -m tiny_llm.report x", "report.png"
    )
    text = (tmp_path / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[1:4] for line in table[2:4]] == [
        ["awc", "complete", "4.0200"],
        ["awc", "ring", "4.1200"],
    ]
    assert {line.count("|") for line in table} == {len(group_table(report, against).headers) + 1}
    assert "](report.png)" in text
    assert "- `failed sweep/bad`: update 120 of 400, loss 5.2500; ValueError: worker 3 | loss nan" in text
    assert "+0.1000, SD 0.0000 over 3 shared seeds (1, 2, 3), 95 % interval" in text
    assert "    python -m tiny_llm.report x" in text


def test_a_bar_in_a_value_does_not_break_the_markdown(tmp_path: Path) -> None:
    report = make_report([record(1, 4.0, data__separator="a|b"), record(1, 4.1, data__separator="c")])
    write_markdown(tmp_path / "report.md", report, None, None, "python", "report.png")
    assert "| a\\|b |" in (tmp_path / "report.md").read_text()


def test_cells_are_rounded_alike(report: Report) -> None:
    table = group_table(report)
    cells = dict(zip(table.headers, table.rows[0], strict=True))
    assert (cells["loss"], cells["SD"], cells["n"], cells["best"]) == ("4.0200", "0.0100", "3", "4.0100")
    assert cells["tokens/s"] == "12,348 ± 1"
    assert cells["hours"] == "0.520 ± 0.010"
    assert cells["consensus error"] == "(2.00 ± 1.00)e-3"


def test_one_run_alone_has_no_spread() -> None:
    table = group_table(make_report([record(1, 4.0)]))
    assert table.headers[0] == "#"
    assert table.rows == (("1", "4.0000", "-", "1", "4.0000", "12,347", "0.510", "1.00e-3"),)


def test_the_headline_counts_every_run(report: Report) -> None:
    assert headline(report) == "14 runs: 12 complete in 4 configurations, 1 failed, 1 waiting"


def test_the_difference_column_tells_baseline_pairs_and_none() -> None:
    found = [
        *runs({("awc", "complete"): 4.0, ("awc", "ring"): 4.1}),
        *runs({("awc", "star"): 4.2}, seeds=(7,)),
        *runs({("awc", "torus"): 4.3}, seeds=(3,)),
    ]
    report = make_report(found)
    base = report.groups[0]
    found_differences = {
        group.number: difference(group, base) for group in report.groups if group.number != 4
    }
    table = group_table(report, found_differences)
    column = table.headers.index("minus baseline")
    assert [row[column] for row in table.rows] == ["baseline", "+0.1000 ± 0.0000", "+0.2500 *", "-"]


def test_the_console_shows_whole_rows_and_reads_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {f"section.key_number_{number}": [number, "[bold]"] for number in range(12)}
    plain = {f"section.key_number_{number}": [0, "x"] for number in range(12)}
    found = [
        RunRecord(Path("run"), "complete", settings, 1, metrics={LOSS: loss})
        for settings, loss in ((wide, 4.0), (plain, 4.1))
    ]
    show(make_report([*found, *left_out()]), None, None)
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(r" *[12] ", line)]
    assert len(rows) == 2
    assert all(f'[{number},"[bold]"]' in rows[0] for number in range(1, 12))
    assert "…" not in printed
    assert "failed      sweep/bad\n" in printed
    assert "update 120 of 400, loss 5.2500; ValueError: worker 3 | loss nan" in printed


def texts(axis: Axes) -> list[str]:
    return [text.get_text() for text in axis.texts]


def title(axis: Axes) -> str:
    return axis.get_title(loc="left")


def test_curves_are_means_over_seeds_with_bands_of_one_sd(report: Report) -> None:
    whole, closer = draw_report(report).axes[:2]
    group = report.groups[0]
    tokens, mean, sd = mean_curve(group)
    losses = np.array([list(run.curve.values()) for run in group.runs])
    assert tokens.tolist() == list(range(100, 1001, 100))
    assert mean == pytest.approx(losses.mean(axis=0))
    assert sd == pytest.approx(losses.std(axis=0, ddof=1))
    assert np.asarray(whole.lines[0].get_ydata()) == pytest.approx(mean)
    band = np.asarray(whole.collections[0].get_paths()[0].vertices)
    assert band[:, 1].max() == pytest.approx((mean + sd).max())
    assert closer.get_xlim()[0] == 500
    assert closer.get_ylim()[1] < whole.get_ylim()[1]


def test_a_curve_is_drawn_where_all_seeds_have_a_value(report: Report) -> None:
    first, second, third = report.groups[0].runs
    shorter = {tokens: loss for tokens, loss in second.curve.items() if tokens != 300}
    cut = RunRecord(second.directory, "complete", second.settings, 2, metrics=second.metrics, curve=shorter)
    tokens, mean, _ = mean_curve(make_report([first, cut, third]).groups[0])
    assert 300 not in tokens
    assert np.isfinite(mean).all()


def test_every_group_has_one_colour_and_its_number_in_all_panels(report: Report) -> None:
    figure = draw_report(report)
    whole, closer, listed, scheme, topology = figure.axes
    colors = group_colors(4)
    assert len(set(colors)) == 4
    assert [line.get_color() for line in whole.lines] == colors
    assert texts(closer) == ["1", "2", "3", "4"]
    assert texts(listed)[:3] == ["1", "4.020", "awc, complete"]
    assert title(scheme) == "final loss against decentralized.scheme"
    assert title(topology) == "final loss against topology.name"
    for panel in (scheme, topology):
        means = {bar.lines[0].get_color(): bar.lines[0].get_ydata()[0] for bar in panel.containers}
        assert means == {
            color: group.statistics[LOSS].mean for color, group in zip(colors, report.groups, strict=True)
        }


def test_lines_join_groups_that_differ_in_the_panels_key_alone(report: Report) -> None:
    scheme = draw_report(report).axes[3]
    assert [text.get_text() for text in scheme.get_xticklabels()] == ["awc", "atc"]
    joined = [line.get_ydata() for line in scheme.lines if len(np.unique(line.get_xdata())) == 2]
    assert [np.asarray(line).tolist() for line in joined] == [
        [pytest.approx(4.02), pytest.approx(4.22)],
        [pytest.approx(4.12), pytest.approx(4.32)],
    ]


def test_numbers_stand_in_their_order_with_missing_ones_first() -> None:
    lrs = {0.01: 4.0, 0.001: 4.2, 1e-5: 4.3, None: 4.4}
    report = make_report([record(1, loss, optimizer__lr=lr) for lr, loss in lrs.items()])
    panel = draw_report(report).axes[-1]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["null", "1e-05", "0.001", "0.01"]
    assert np.asarray(panel.lines[0].get_ydata()).tolist() == [4.4, 4.3, 4.2, 4.0]


def test_a_diverged_group_is_named_above_and_flattens_no_panel() -> None:
    losses = {0.001: 4.2, 0.002: 4.1, 0.004: 4.0, 0.008: 4.15, 1.0: 11.0}
    report = make_report([record(1, loss, optimizer__lr=lr) for lr, loss in losses.items()])
    assert len(nearest_groups(report)) == 4
    _, closer, _, panel = draw_report(report).axes
    assert panel.get_title(loc="right") == "above: 5"
    assert panel.get_ylim()[1] < 5
    assert closer.get_ylim()[1] < 8
    near = make_report([record(1, loss, optimizer__lr=lr) for lr, loss in losses.items() if lr < 1])
    assert draw_report(near).axes[3].get_title(loc="right") == ""


@pytest.mark.parametrize("count", [1, 8, 9, 48, 200])
def test_any_number_of_groups_has_as_many_colours(count: int) -> None:
    assert len(set(group_colors(count))) == count


def test_numbers_at_the_ends_are_moved_apart() -> None:
    heights = spread_apart([0.1, 0.11, 0.12, 0.99, 1.5], 0.05)
    assert heights == pytest.approx([0.1, 0.15, 0.2, 0.95, 1.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "found",
    [
        [],
        left_out(),
        [record(1, 4.0)],
        [RunRecord(Path("run"), "complete", {}, 1, metrics={LOSS: 4.0})],
        [RunRecord(Path("run"), "running", {}, 1, curve={100: 5.0, 200: 4.0})],
        [record(1, 4.0, optimizer__lr=number / 1000) for number in range(40)],
        [
            record(1, 4.0, topology__name="a_very_long_name_of_a_topology" + str(number))
            for number in range(5)
        ],
    ],
    ids=["nothing", "none complete", "one", "no curve", "running", "40 equal groups", "long names"],
)
def test_every_stage_of_a_sweep_gives_a_picture_without_a_warning(
    found: list[RunRecord], tmp_path: Path
) -> None:
    plot_report(make_report(found), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_unfinished_runs_are_drawn_as_long_as_none_is_complete() -> None:
    running = RunRecord(Path("run"), "running", {}, 1, curve={100: 5.0, 200: 4.0})
    assert np.asarray(draw_report(make_report([running])).axes[0].lines[0].get_ydata()).tolist() == [5.0, 4.0]
    assert len(draw_report(make_report([running, record(1, 4.0)])).axes[0].lines) == 1


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot_report(report, tmp_path / "report.png")
    before = (tmp_path / "report.png").read_bytes()

    def half_a_file(_: Figure, file: Any, **__: Any) -> None:
        file.write(b"\x89PNG")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", half_a_file)
    with pytest.raises(OSError, match="No space"):
        plot_report(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]
