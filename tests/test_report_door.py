"""`python -m tiny_llm.report`: from run directories to a table and four files, or to one line of refusal."""

from __future__ import annotations

import csv
import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from analysis.run_directories import make_run, write_status

from tiny_llm import report as door
from tiny_llm.training.run_directory import RunDirectory

FILES = {"report.csv", "report.json", "report.md", "report.png"}
LOSSES = {("awc", "ring", 42): 4.10, ("awc", "ring", 43): 4.16, ("awc", "ring", 44): 4.13}
LOSSES |= {("awc", "complete", 42): 4.00, ("awc", "complete", 43): 4.02, ("awc", "complete", 44): 4.04}
LOSSES |= {("atc", "ring", 42): 4.30, ("atc", "ring", 43): 4.25, ("atc", "ring", 44): 4.20}
LOSSES |= {("atc", "complete", 42): 4.21, ("atc", "complete", 43): 4.22, ("atc", "complete", 44): 4.23}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Twelve complete runs and a failed one."""
    for (scheme, topology, seed), loss in LOSSES.items():
        swept = (f"decentralized={scheme}", f"topology={topology}", f"runtime.seed={seed}")
        make_run(tmp_path / "sweep" / f"scheme={scheme},topology={topology},seed={seed}", *swept, loss=loss)
    failed = ("decentralized=atc", "topology=ring", "runtime.seed=45")
    error = "NonFiniteError: worker 2 has a loss of nan"
    make_run(tmp_path / "sweep/failed", *failed, status="failed", error=error, updates=100)
    return tmp_path / "sweep"


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the picture, which takes most of the time."""
    monkeypatch.setattr("tiny_llm.analysis.sweep_plot.plot_report", lambda _, out: out.touch())


def printed_rows(text: str) -> list[list[str]]:
    """Return the cells of the table's rows."""
    lines = [line.split() for line in text.splitlines()]
    return [cells for cells in lines if cells and cells[0].isdecimal() and "runs:" not in cells]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        door.main(list(arguments))
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err


def test_a_sweep_becomes_a_ranked_table_and_four_files(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door.main([str(sweep)])
    printed = capsys.readouterr().out
    assert printed.startswith("13 runs: 12 complete in 4 configurations, 1 failed\n")
    ranked = [row[:3] for row in printed_rows(printed)]
    assert ranked == [
        ["1", "awc", "complete"],
        ["2", "awc", "ring"],
        ["3", "atc", "complete"],
        ["4", "atc", "ring"],
    ]
    for row in printed_rows(printed):
        losses = [loss for (scheme, topology, _), loss in LOSSES.items() if [scheme, topology] == row[1:3]]
        expected = f"{np.mean(losses):.4f} {np.std(losses, ddof=1):.4f} 3 {min(losses):.4f}"
        assert expected in " ".join(row)
    assert "failed      " + str(sweep / "failed") in printed
    assert "update 100 of 400" in printed
    assert "NonFiniteError: worker 2 has a loss of nan" in printed
    assert FILES.issubset(path.name for path in sweep.iterdir())


@pytest.mark.usefixtures("unpainted")
def test_the_files_agree_with_the_runs(sweep: Path, tmp_path: Path) -> None:
    door.main([str(sweep), f"out={tmp_path / 'new/folder'}"])
    out = tmp_path / "new/folder"
    assert {path.name for path in out.iterdir()} == FILES
    assert not FILES & {path.name for path in sweep.iterdir()}
    with open(out / "report.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    groups = json.loads((out / "report.json").read_text())["groups"]
    for row, group in zip(rows, groups, strict=True):
        found = []
        for run in group["runs"]:
            found.append(
                json.loads((Path(run["directory"]) / "result.json").read_text())["final_validation_loss"]
            )
        assert float(row["final_validation_loss_mean"]) == pytest.approx(np.mean(found), rel=1e-12)
        assert float(row["final_validation_loss_sd"]) == pytest.approx(np.std(found, ddof=1), rel=1e-9)
        assert group["final_validation_loss"]["mean"] == float(row["final_validation_loss_mean"])


@pytest.mark.usefixtures("unpainted")
def test_compare_and_baseline_give_paired_differences(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door.main([str(sweep), "compare=topology=ring+scheme=awc,1", "baseline=topology=complete"])
    printed = capsys.readouterr().out
    # 0.10, 0.14, 0.09: mean 0.11, SD 0.02646, t(0.975, 2) = 4.3027
    assert "+0.1100, SD 0.0265 over 3 shared seeds (42, 43, 44), 95 % interval +0.0443 to +0.1757" in printed
    columns = [" ".join(row) for row in printed_rows(printed)]
    assert ["baseline" in row for row in columns] == [True, False, True, False]
    assert "+0.1100 ± 0.0265" in columns[1]
    assert "+0.0300 ± 0.0600" in columns[3]


def test_twelve_runs_take_under_three_seconds_and_no_torch(sweep: Path) -> None:
    script = """
import sys
from tiny_llm.report import main
main(sys.argv[1:])
assert "torch" not in sys.modules
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", script, str(sweep)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of its own: how long others keep the cores busy is not its doing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert len(printed_rows(shown.stdout)) == 4
    assert max(len(line) for line in shown.stdout.splitlines()) > 100  # piped: 80 columns would cut the table
    assert "…" not in shown.stdout
    assert "\x1b" not in shown.stdout


def test_a_pipe_that_closes_early_is_no_error(sweep: Path) -> None:
    command = [sys.executable, "-m", "tiny_llm.report", str(sweep)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert FILES.issubset(path.name for path in sweep.iterdir())


@pytest.mark.usefixtures("unpainted")
def test_an_old_terminal_shows_question_marks_instead_of_failing(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    door.main([str(sweep)])
    sys.stdout.flush()
    assert b"16,384 ? 0" in shown.getvalue()


@pytest.mark.usefixtures("unpainted")
def test_a_run_may_go_on_while_it_is_read(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = sweep / "running"
    make_run(
        running,
        "decentralized=awc",
        "topology=ring",
        "runtime.seed=46",
        status="running",
        updates=200,
        loss=1,
    )
    with open(running / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "upd')
    door.main([str(sweep)])
    printed = capsys.readouterr().out
    assert "14 runs: 12 complete in 4 configurations, 1 failed, 1 running" in printed
    assert "update 200 of 400" in printed
    assert [row[0] for row in printed_rows(printed)] == ["1", "2", "3", "4"]


@pytest.mark.usefixtures("unpainted")
def test_the_trainers_own_status_is_understood(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory(sweep / "failed").set_status("interrupted", signal="SIGUSR2", updates=400)
    door.main([str(sweep)])
    assert "1 interrupted" in capsys.readouterr().out.splitlines()[0]


def test_a_sweep_without_a_complete_run_is_reported_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path / "run", status="interrupted", updates=100)
    write_status(directory, "interrupted", signal="SIGTERM")
    door.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith("1 run: 0 complete in 0 configurations, 1 interrupted")
    assert "by SIGTERM" in printed
    assert FILES.issubset(path.name for path in tmp_path.iterdir())


@pytest.mark.usefixtures("unpainted")
def test_directories_with_an_equals_sign_are_directories(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door.main(
        [str(sweep / "scheme=awc,topology=ring,seed=42"), str(sweep / "scheme=awc,topology=ring,seed=43")]
    )
    assert capsys.readouterr().out.startswith("2 runs: 2 complete in 1 configuration\n")


def test_a_place_that_cannot_be_written_shows_the_table_and_refuses(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        door.main([str(sweep), f"out={tmp_path / 'file/below'}"])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert len(printed_rows(captured.out)) == 4
    assert "cannot write into" in captured.err
    assert "name another with out=DIR" in captured.err


def test_help_tells_all_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    door.main(["--help"])
    printed = capsys.readouterr().out
    assert "usage: python -m tiny_llm.report DIR... [compare=A,B] [baseline=KEY=VALUE] [out=DIR]" in printed
    assert max(len(line) for line in printed.splitlines()) < 120


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name at least one directory with runs"),
        (["{}/nowhere"], "does not exist"),
        (["{}", "compar=1,2"], "'compar=1,2': unknown argument; did you mean 'compare'?"),
        (["{}", "optimizer.lr=1"], "unknown argument; allowed are compare=..., baseline=..., out=..."),
        (["{}", "--compare=1,2"], "unknown argument; did you mean 'compare'?"),
        (["{}", "compare="], "write compare=VALUE"),
        (["{}", "compare=1,2", "compare=1,3"], "give compare once"),
        (["{}", "compare=1,9"], "no group with a complete run is 9"),
        (["{}", "baseline=topology=star"], "no complete run has this value"),
        (["{}", "out={}/failed/status.json"], "is a file; name a directory"),
        (["{}/failed/status.json"], "is a file; name the directory"),
    ],
)
def test_mistakes_get_one_line(
    sweep: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refusal(capsys, *(argument.format(sweep) for argument in arguments))
