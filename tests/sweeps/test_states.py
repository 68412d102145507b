"""How a point stands, from its directory and from who is alive; what the board and the end say of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from settings import local_settings

from tiny_llm.config.compose import compose
from tiny_llm.sweeps.board import Board, Row, count_labels, tell_end
from tiny_llm.sweeps.points import make_points
from tiny_llm.sweeps.pool import Pool
from tiny_llm.sweeps.states import Label, Standing, is_held, label, last_lines, read_standing
from tiny_llm.sweeps.sweep import Sweep
from tiny_llm.training.run_directory import RunDirectory

ROW = {"event": "train", "update": 40, "tokens": 4000, "loss": 6.5, "tokens_per_second": 100.0}


def write(directory: Path, rows: list[dict[str, Any]], **files: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def test_a_standing_has_progress_loss_and_time_left(tmp_path: Path) -> None:
    run = write(
        tmp_path, [ROW, {"event": "validation", "loss": 1}], status={"status": "running", "updates": 100}
    )
    assert read_standing(run) == Standing("running", 40, 100, 6.5, seconds_left=60.0)


def test_half_written_and_damaged_files_count_as_absent(tmp_path: Path) -> None:
    run = write(tmp_path, [ROW])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "upda')
    (run / "status.json").write_text("{")
    assert read_standing(run).update == 40
    assert read_standing(run).status is None
    assert read_standing(tmp_path / "absent") == Standing(None)


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    rows = [ROW | {"update": number, "local_losses": [1.0] * 50} for number in range(1, 2000)]
    assert read_standing(write(tmp_path, rows)).update == 1999


def test_complete_needs_a_result(tmp_path: Path) -> None:
    run = write(tmp_path, [ROW], status={"status": "complete", "updates": 40})
    assert read_standing(run).status == "interrupted"
    write(tmp_path, [ROW], result={"final_validation_loss": 3.25})
    assert read_standing(run).complete
    assert read_standing(run).loss == 3.25


@pytest.mark.parametrize(
    ("status", "alive", "began", "expected"),
    [
        (None, None, False, "waiting"),
        (None, None, True, "lost"),
        ("running", None, True, "lost"),
        ("failed", None, False, "failed"),
        ("failed", "running", True, "running"),
        ("interrupted", "waiting", True, "waiting"),
        ("interrupted", None, True, "interrupted"),
        ("complete", None, True, "done"),
    ],
)
def test_a_point_is_what_its_run_says_unless_its_job_lives(
    status: str | None, alive: Label | None, began: bool, expected: Label
) -> None:
    assert label(Standing(status), alive, began) == expected


def test_a_directory_is_held_while_its_run_lives(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with RunDirectory(tmp_path).locked():
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def rows_of(tmp_path: Path, *stand: tuple[Label, Standing]) -> list[Row]:
    lines = [compose(["data=stdlib", f"runtime.seed={seed}"]) for seed in range(len(stand))]
    points = make_points(lines, tmp_path, {})
    return [
        Row(point, label, standing, "here") for point, (label, standing) in zip(points, stand, strict=True)
    ]


def test_a_terminal_gets_a_table_with_loss_and_time_left(tmp_path: Path) -> None:
    running = Standing("running", 1040, 2000, 6.5, seconds_left=3725)
    rows = rows_of(
        tmp_path, ("waiting", Standing(None)), ("running", running), ("failed", Standing("failed"))
    )
    screen = io.StringIO()
    with Board("s", Console(file=screen, force_terminal=True, width=120, height=30)) as board:
        board.show(rows)
    shown = screen.getvalue()
    assert "1 waiting, 1 running, 0 done, 1 failed, 0 lost" in shown
    for words in ("1,040/2,000", "6.5000", "1:02:05", "here"):
        assert words in shown
    assert shown.index("running") < shown.rindex("failed") < shown.rindex("waiting"), "what runs comes first"


def test_elsewhere_each_change_is_one_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path, ("waiting", Standing(None)), ("done", Standing("complete", loss=3.2)))
    with Board("s", Console(file=io.StringIO())) as board:
        board.show(rows)
        board.show(rows)
    assert capsys.readouterr().out == f"done        {rows[1].point.name}  loss 3.2000\n"
    assert count_labels(rows) == "1 waiting, 0 running, 1 done, 0 failed, 0 lost"


def test_the_end_tells_the_last_words_from_the_error_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(
        tmp_path, ("failed", Standing("failed", error="OSError: disk")), ("done", Standing("complete"))
    )
    sweep = Sweep(tmp_path)
    sweep.jobs_folder.mkdir()
    log = sweep.jobs_folder / f"{rows[0].point.name}.log"
    log.write_text("update 1\nTraceback (most recent call last):\n  here\nOSError: disk\n\n")
    tell_end(rows, Pool(sweep, local_settings()))
    told = capsys.readouterr().err
    assert "overrides  data=stdlib runtime.seed=0\n" in told
    assert "error      OSError: disk\n" in told
    assert "update 1" not in told
    assert rows[1].point.name not in told
    assert last_lines(log, 2) == ["  here", "OSError: disk"]
