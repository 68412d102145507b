"""A report reads what run directories say, whatever state they are in, and never stops for one of them."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_directories import BATCH_TOKENS, UPDATES, config_of, make_run, write_status

from tiny_llm.analysis.runs import CONSENSUS, HOURS, LOSS, SPEED, find_runs, read_run
from tiny_llm.config.errors import UserError
from tiny_llm.config.saved import NOT_THE_RECIPE, flatten, plain, to_yaml


def ended_process() -> int:
    """Return the id of a process of this machine that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_complete_run_has_its_settings_its_four_numbers_and_its_curve(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", "decentralized=awc", loss=4.25, seconds=1800, consensus=2e-3)
    run = read_run(directory)
    assert (run.status, run.seed, run.reason) == ("complete", 42, "")
    assert run.metrics[LOSS] == 4.25
    assert run.metrics[HOURS] == 0.5
    assert run.metrics[SPEED] == pytest.approx(UPDATES * BATCH_TOKENS / 1800)
    assert run.metrics[CONSENSUS] == pytest.approx(2e-3)  # of the last train row: the first says 4e-3
    assert len(run.curve) == 8
    assert min(run.curve) == 50 * BATCH_TOKENS
    assert min(run.curve.values()) > 4.25  # the final validation, on another split, is no point of it


def test_settings_are_the_configs_leaves_but_for_the_seed_and_what_changes_no_number(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", "decentralized=awc"))
    leaves = flatten(plain(config_of("decentralized=awc")))
    assert run.settings == {
        key: value for key, value in leaves.items() if key not in NOT_THE_RECIPE and key != "runtime.seed"
    }


def test_a_synchronous_run_has_no_topology(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.settings["decentralized.num_models"] == 1
    assert [key for key in run.settings if key.startswith(("topology", "adaptive"))] == []
    assert CONSENSUS not in run.metrics


def test_a_torn_last_line_is_no_row(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", status="interrupted", updates=100)
    before = read_run(directory)
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"event": "validation", "update": 110, "tok')
    assert read_run(directory) == before
    assert before.update == 100


def test_a_damaged_line_in_the_middle_makes_a_damaged_run(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    metrics = directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"event": "validation",', '"event": "validation"'))
    run = read_run(directory)
    assert run.status == "damaged"
    assert "metrics.jsonl is damaged" in run.reason


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("result.json", None, "result.json is missing"),
        ("result.json", '{"final_valid', "result.json is damaged"),
        ("result.json", '{"final_validation_loss": NaN}', "final_validation_loss=nan"),
        ("result.json", '{"final_validation_loss": null}', "final_validation_loss=None"),
        ("result.json", "[]", "it holds no mapping"),
        ("status.json", '{"status": "comp', "status.json is damaged"),
        ("resolved.yaml", "a: [", "resolved.yaml: "),
        ("resolved.yaml", "- a", "resolved.yaml: "),
        ("resolved.yaml", "", "resolved.yaml is missing or empty"),
    ],
)
def test_a_run_with_a_damaged_file_does_not_count_and_says_why(
    tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    directory = make_run(tmp_path / "run")
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    run = read_run(directory)
    assert (run.status, run.metrics) == ("damaged", {})
    assert reason in run.reason
    assert "\n" not in run.reason


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("  lr: 0.0056\n", "  lr: 0.0057\n", "damaged"),
        ("  seed: 42\n", "  seed: 43\n", "damaged"),
        ("  log_every: 20\n", "  log_every: 21\n", "complete"),
        ("  lr: 0.0056\n", "  lr: 0.0056\n  a_key_of_another_version: 1\n", "complete"),
    ],
)
def test_settings_that_were_changed_after_the_run_make_it_damaged(
    tmp_path: Path, old: str, new: str, status: str
) -> None:
    path = make_run(tmp_path / "run") / "resolved.yaml"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    run = read_run(path.parent)
    assert run.status == status
    assert ("resolved.yaml is not the one of result.json" in run.reason) == (status == "damaged")


def test_a_result_beside_a_status_that_is_not_complete_does_not_count(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    write_status(directory, "failed", error="OSError: No space\nleft on device")
    run = read_run(directory)
    assert (run.status, run.metrics) == ("failed", {})
    assert run.reason == "OSError: No space left on device"


def test_a_run_without_a_status_is_unknown(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    (directory / "status.json").unlink()
    run = read_run(directory)
    assert (run.status, run.reason) == ("unknown", "there is no status.json")


def test_an_interrupted_run_tells_its_progress_and_signal(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", status="interrupted", updates=120)
    write_status(directory, "interrupted", signal="SIGTERM")
    run = read_run(directory)
    assert (run.status, run.update, run.updates, run.reason) == ("interrupted", 120, UPDATES, "by SIGTERM")
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert run.loss == last["loss"]


def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", status="running", updates=120)
    assert read_run(directory).status == "running"
    write_status(directory, "running", pid=ended_process())
    assert read_run(directory).status == "lost"


def test_a_process_of_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", status="running", updates=120)
    write_status(directory, "running", pid=ended_process(), host=f"not-{socket.gethostname()}")
    an_hour_ago = (directory / "status.json").stat().st_mtime - 3600
    for name in ("metrics.jsonl", "status.json"):
        os.utime(directory / name, (an_hour_ago, an_hour_ago))
    run = read_run(directory)
    assert run.status == "running"
    assert run.reason == f"on not-{socket.gethostname()}, last written 60 min ago"


def test_a_run_that_has_just_begun_is_read_before_it_has_rows(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "resolved.yaml").write_text(to_yaml(config_of()))
    write_status(directory, "running")
    run = read_run(directory)
    assert (run.status, run.update, run.loss, run.curve) == ("running", None, None, {})


def test_numbers_that_are_not_finite_are_none(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", status="failed", error="diverged", updates=50)
    with open(directory / "metrics.jsonl", "a") as file:
        for event in ("validation", "train"):
            file.write(json.dumps({"event": event, "update": 60, "tokens": 60, "loss": math.nan}) + "\n")
    run = read_run(directory)
    assert (run.update, run.loss, list(run.curve)) == (60, None, [50 * BATCH_TOKENS])


def test_runs_are_found_at_any_depth_but_not_in_hidden_folders_or_in_runs(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name) for name in ("b", "a/deep/er", "a/other")]
    make_run(tmp_path / ".submitit/job")
    make_run(tmp_path / "b/backup")
    assert find_runs([tmp_path]) == [tmp_path / "a/deep/er", tmp_path / "a/other", tmp_path / "b"]
    assert find_runs([made[0]]) == [made[0]]


def test_a_run_is_found_once_however_often_it_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sweep/run")
    (tmp_path / "link").symlink_to(run)
    assert find_runs([tmp_path / "sweep", run, tmp_path / "link"]) == [run]


def test_points_of_a_sweep_that_have_not_begun_are_waiting_or_failed(tmp_path: Path) -> None:
    begun = make_run(tmp_path / "a")
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "composed.yaml").write_text(to_yaml(config_of()))
    write_status(tmp_path / "c", "failed", error="CacheError: no network")
    (tmp_path / "sweep.json").write_text(json.dumps({"points": {name: {} for name in "abcd"}}))
    runs = [read_run(directory) for directory in find_runs([tmp_path])]
    assert [(run.directory.name, run.status, run.settings) for run in runs[1:]] == [
        ("b", "waiting", {}),
        ("c", "failed", {}),
        ("d", "waiting", {}),
    ]
    assert runs[0] == read_run(begun)
    assert runs[2].reason == "CacheError: no network"


@pytest.mark.parametrize(
    ("made", "named", "said"),
    [
        ("", "nowhere", "does not exist"),
        ("empty/", "empty", "holds no run: there is no resolved.yaml"),
        (
            "run/metrics.jsonl",
            "run/metrics.jsonl",
            "is a file; name the directory of a run or a sweep, as",
        ),
    ],
)
def test_a_folder_without_runs_is_refused(tmp_path: Path, made: str, named: str, said: str) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).mkdir() if made.endswith("/") else (tmp_path / (made or "x")).touch()
    with pytest.raises(UserError, match=said):
        find_runs([tmp_path / named])


def test_a_damaged_sweep_is_refused_with_a_way_out(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "sweep.json").write_text('{"points": ')
    with pytest.raises(UserError, match=r"sweep.json is damaged.*move it away to see the runs alone"):
        find_runs([tmp_path])
