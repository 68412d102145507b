"""A run that was stopped, in whatever way, ends with the bits of one that was not."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from running import (
    assert_same_run,
    numbers_of,
    rows_of,
    send_at_row,
    start,
    status_of,
    train,
    wait_until_running,
)

from tiny_llm.config.errors import UserError
from tiny_llm.training.checkpoint import load_state, save_state
from tiny_llm.training.saved_run import open_run

PACKED = ["decentralized=awc", "decentralized.num_models=4", "topology=one_peer_ring"]
ADAPTIVE = ["adaptive_consensus=on", "adaptive_consensus.start_frac=0.3", "adaptive_consensus.p=1"]
EPOCHS = ["training.checkpoint_policy=interval"]


@pytest.fixture(scope="module")
def single(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "single"
    train(*tiny_overrides, *EPOCHS, f"output_dir={run}")
    return run


@pytest.fixture(scope="module")
def packed(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "packed"
    train(*tiny_overrides, *EPOCHS, *PACKED, *ADAPTIVE, f"output_dir={run}")
    return run


@pytest.fixture(params=["single", "packed"])
def whole(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_a_run_leaves_what_its_directory_promises(single: Path) -> None:
    names = {path.name for path in single.iterdir()}
    settings = {"resolved.yaml", "environment.json"}
    results = {"run.log", "metrics.jsonl", "best.json", "status.json", "result.json", "loss.png", "final.pt"}
    assert settings | results < names
    assert not [name for name in names if name.endswith(".tmp") or name == "recovery.pt"]
    events = [row["event"] for row in rows_of(single)]
    assert (events.count("validation"), events[-1], status_of(single)) == (4, "final_validation", "complete")
    last = next(row for row in reversed(rows_of(single)) if row["event"] == "train")
    result = json.loads((single / "result.json").read_text())
    assert last["tokens"] == result["tokens"] == last["update"] * 512
    assert rows_of(single)[0]["loss"] > result["final_validation_loss"]


def test_resuming_a_complete_run_changes_nothing(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    train(f"resume={whole}")
    assert "is complete; nothing is left to do" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_twice_the_same_run_gives_the_same_bits(
    single: Path, tiny_overrides: list[str], tmp_path: Path
) -> None:
    train(*tiny_overrides, *EPOCHS, f"output_dir={tmp_path / 'again'}")
    assert_same_run(tmp_path / "again", single)


@pytest.mark.parametrize("epoch", [1, 3])
def test_an_epochs_state_goes_on_in_another_directory(whole: Path, epoch: int, tmp_path: Path) -> None:
    train(f"resume={whole}/epoch-{epoch:03d}.pt", f"output_dir={tmp_path / 'on'}")
    assert_same_run(tmp_path / "on", whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_saves_and_resuming_continues(
    whole: Path, tiny_overrides: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    extra = [*PACKED, *ADAPTIVE] if (whole / "node-000").exists() else []
    code = send_at_row(start(*tiny_overrides, *extra, f"output_dir={run}"), run, 3, number)
    assert (code, status_of(run)) == (128 + number, "interrupted")
    assert (run / "recovery.pt").exists()
    train(f"resume={run}", "training.checkpoint_policy=interval")
    assert [p for p in run.iterdir() if p.name == "recovery.pt"] == []
    rows, expected = numbers_of(run), numbers_of(whole)
    assert rows == expected
    seconds = [row["seconds"] for row in rows_of(run)]
    assert seconds == sorted(seconds)
    a, b = (torch.load(path / "final.pt", weights_only=True) for path in (run, whole))
    assert torch.equal(a["parameters"], b["parameters"])


def test_twenty_kills_change_no_bit(packed: Path, tiny_overrides: list[str], tmp_path: Path) -> None:
    often = "training.recovery_minutes=0.0001"
    draw = random.Random(20)
    kills = rounds = 0
    while kills < 20:
        run = tmp_path / f"run-{rounds}"
        rounds += 1
        while not (run / "final.pt").exists():
            whole = (run / "recovery.pt").exists()
            if not whole:  # killed before anything was kept: start over
                shutil.rmtree(run, ignore_errors=True)
            fresh = [*tiny_overrides, *EPOCHS, *PACKED, *ADAPTIVE, often, f"output_dir={run}"]
            process = start(*([f"resume={run}"] if whole else fresh))
            if draw.random() < 0.8:
                wait_until_running(process, run)
            process.join(draw.uniform(0, 0.3))
            kills += process.is_alive()
            process.kill()
            process.join()
        train(f"resume={run}")
        assert_same_run(run, packed)


def test_damage_is_named(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(single, run)
    content = bytearray((run / "final.pt").read_bytes())
    (run / "final.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"final\.pt is damaged"):
        train(f"resume={run / 'final.pt'}")
    (run / "result.json").unlink()
    (run / "status.json").write_text("[]")
    capsys.readouterr()
    train(f"resume={run}")  # the newest whole one: epoch-004
    assert_same_run(run, single)
    warning = (
        f"warning: {run / 'final.pt'} is damaged: it is cut short or no training state; epoch-004.pt is used"
    )
    assert warning in capsys.readouterr().err


def test_weights_with_a_flipped_bit_and_a_changed_recipe_are_named(single: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(single, run)
    path = run / "epoch-002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    open_run(str(run), "epoch-003.safetensors", "cpu")
    with pytest.raises(UserError, match=r"epoch-002\.safetensors is damaged: its bytes are not those"):
        open_run(str(run), path.name, "cpu")
    settings = (run / "resolved.yaml").read_text()
    assert "  lr: 0.0056\n" in settings
    (run / "resolved.yaml").write_text(settings.replace("  lr: 0.0056\n", "  lr: 0.0057\n"))
    for name in ("epoch-003.safetensors", "epoch-003.pt", "final.pt"):
        with pytest.raises(
            UserError, match=rf"{name} belongs to another recipe .* restore the resolved\.yaml"
        ):
            open_run(str(run), name, "cpu")
    (run / "resolved.yaml").write_text(settings.replace("  lr:", "  lrr:"))
    with pytest.raises(UserError, match=r"resolved\.yaml: unknown key 'optimizer\.lrr'"):
        open_run(str(run), None, "cpu")


def test_side_files_that_are_damaged_stop_no_resumed_run(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(single, run)
    for name in ("final.pt", "epoch-004.pt", "result.json"):
        (run / name).unlink()
    (run / "environment.json").write_text("[]")
    metrics = (run / "metrics.jsonl").read_bytes()
    first = metrics.index(b"\n")
    (run / "metrics.jsonl").write_bytes(b"g" * first + metrics[first:])
    train(f"resume={run}")
    printed = capsys.readouterr()
    assert f"warning: {run / 'environment.json'} is damaged" in printed.err
    assert (run / "environment.damaged.json").read_text() == "[]"
    assert (
        f"warning: loss.png could not be drawn: {run / 'metrics.jsonl'} is damaged: line 1 holds"
        in printed.out
    )
    assert json.loads((run / "status.json").read_text())["status"] == "complete"


def test_a_run_that_ended_before_it_kept_anything_is_told_so(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(*tiny_overrides, "training.checkpoint_policy=none", f"output_dir={run}")
    with pytest.raises(UserError, match=r"already holds a run; it kept no state to continue: remove it"):
        train(*tiny_overrides, f"output_dir={run}")
    with pytest.raises(UserError, match=r"no training state to resume from; remove it and start again"):
        train(f"resume={run}")


def test_a_flipped_bit_in_a_state_is_named(single: Path, tmp_path: Path) -> None:
    shutil.copytree(single, tmp_path / "run")
    path = tmp_path / "run" / "epoch-002.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"epoch-002\.pt is damaged"):
        train(f"resume={path}", f"output_dir={tmp_path / 'on'}")
    for name in ("final.pt", "epoch-004.pt", "result.json", "epoch-003.pt"):
        (tmp_path / "run" / name).unlink()
    train(f"resume={tmp_path / 'run'}")  # the newest whole one: epoch-001
    assert_same_run(tmp_path / "run", single)


def test_a_workers_file_that_is_damaged_missing_or_foreign_is_named(packed: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        run = tmp_path / name
        shutil.copytree(packed, run)
        return run

    run = broken("damaged")
    content = bytearray((run / "node-002/epoch-002.pt").read_bytes())
    content[-100] ^= 1
    (run / "node-002/epoch-002.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"node-002/epoch-002\.pt is damaged"):
        train(f"resume={run / 'epoch-002.pt'}", f"output_dir={tmp_path / 'x'}")
    run = broken("missing")
    (run / "node-001/epoch-002.pt").unlink()
    with pytest.raises(UserError, match=r"node-001/epoch-002\.pt is missing"):
        train(f"resume={run / 'epoch-002.pt'}", f"output_dir={tmp_path / 'x'}")
    run = broken("foreign")
    shutil.copyfile(run / "node-001/epoch-003.pt", run / "node-001/epoch-002.pt")
    with pytest.raises(UserError, match=r"node-001/epoch-002\.pt is damaged"):
        train(f"resume={run / 'epoch-002.pt'}", f"output_dir={tmp_path / 'x'}")
    assert not (tmp_path / "x" / "metrics.jsonl").exists()
    for name in ("final.pt", "epoch-004.pt", "epoch-003.pt", "result.json"):
        (tmp_path / "missing" / name).unlink()
    train(f"resume={tmp_path / 'missing'}")  # the newest whole one: epoch-001
    assert_same_run(tmp_path / "missing", packed)


def test_one_workers_part_cannot_resume(packed: Path) -> None:
    with pytest.raises(UserError, match="cannot resume a run by itself"):
        train(f"resume={packed}/node-001/epoch-001.pt")


def test_a_worker_file_holds_its_own_bytes_and_the_root_none(packed: Path) -> None:
    final = load_state(packed / "final.pt")
    row = final["parameters"][0].nbytes
    for i in range(4):
        path = packed / f"node-{i:03d}" / "epoch-004.pt"
        assert 3 * row < path.stat().st_size < 3 * row + 60_000
        worker = load_state(path)
        assert (worker["index"], worker["workers_in_all"], worker["step"]) == (i, 4, final["update"])
        entry = final["layout"][0]
        part = final["parameters"][i, entry["start"] : entry["start"] + entry["numel"]].view(entry["shape"])
        assert torch.equal(worker["weights"][entry["name"]], part)
    assert (packed / "epoch-004.pt").stat().st_size < row


def test_an_interrupted_set_is_written_again_and_a_published_one_never(packed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(packed, run)
    for path in (run / "epoch-004.pt", run / "final.pt", run / "result.json", run / "node-003/epoch-004.pt"):
        path.unlink()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("epoch-003.*")}
    train(f"resume={run}")
    assert_same_run(run, packed)
    assert (run / "node-003/epoch-004.pt").exists()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("epoch-003.*")} == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=0.1", "optimizer.lr=0.1 differs from 0.008"),
        ("optimizer.grad_clip=null", "optimizer.grad_clip=null differs from 1.0"),
        ("decentralized=atc", "decentralized.scheme=atc differs from awc"),
        ("topology=ring", "topology.name=ring differs from one_peer_ring"),
        ("adaptive_consensus.p=2", "adaptive_consensus.p=2 differs from 1"),
        ("runtime.seed=1", "runtime.seed=1 differs from 42"),
        ("training.tokens_per_parameter=2", "training.tokens_per_parameter=2 differs from 1"),
    ],
)
def test_what_would_change_the_numbers_is_refused_with_both_values(
    packed: Path, override: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(f"resume={packed}", override)


def test_going_back_in_place_is_refused(single: Path) -> None:
    with pytest.raises(UserError, match=r"final\.pt is newer than epoch-002\.pt"):
        train(f"resume={single}/epoch-002.pt")


def test_other_data_is_refused(single: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(single, run)
    state = load_state(run / "epoch-001.pt")
    save_state(run / "other.pt", {**state, "identity": {**state["identity"], "data": "0" * 64}})
    with pytest.raises(UserError, match="belongs to another data"):
        train(f"resume={run / 'other.pt'}", f"output_dir={tmp_path / 'x'}")
