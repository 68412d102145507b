"""A run on several ranks ends with a word and a whole state, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from rank_groups import SERVER, environments, outcome, start_ranks

from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.distributed import ranks as ranks_module
from tiny_llm.distributed.ranks import Ranks

sys.path += [str(Path(__file__).parents[1] / "training"), str(Path(__file__).parents[1])]
from reference.small import apart
from running import STATE, numbers_of, rows_of, status_of, train

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 4.0
WORKERS = ["decentralized=awc", "decentralized.num_models=4", "topology=one_peer_ring"]
TIMEOUT = f"runtime.timeout_seconds={TIMEOUT_SECONDS:g}"
OFTEN = "training.recovery_minutes=0.0005"


def _train_as_rank(environment: dict[str, str], overrides: list[str], said: Path) -> None:
    os.environ |= environment
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    with user_errors_in_one_line():
        train(*overrides)


@dataclass
class Company:
    """The ranks of one run, what they print and where they write."""

    processes: list[BaseProcess]
    run: Path
    folder: Path

    @staticmethod
    def of_two(folder: Path, *overrides: str, second: list[str] | None = None) -> Company:
        """Start two ranks; `second` is what the second is told otherwise than the first."""
        run, processes = folder / "run", []
        for rank, environment in enumerate(environments(2)):
            own = [*overrides, f"output_dir={run}", *((second or []) if rank else [])]
            processes.append(
                SERVER.Process(target=_train_as_rank, args=(environment, own, folder / f"said-{rank}"))
            )
            processes[-1].start()
        return Company(processes, run, folder)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not condition():
            assert all(process.is_alive() for process in self.processes), self.errors(0) + self.errors(1)
            time.sleep(0.002)
        assert condition()

    def wait_for_middle(self) -> None:
        self.wait_for(lambda: len(rows_of(self.run)) >= 3)

    def send(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def codes(self, seconds: float = 60) -> list[int | None]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def said(self, rank: int) -> list[str]:
        path = self.folder / f"said-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def errors(self, rank: int) -> list[str]:
        """Return the lines in which a rank says why it ends, of which there should be one."""
        return [line for line in self.said(rank) if line.startswith(("error:", "Traceback"))]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def single(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of one process."""
    run = tmp_path_factory.mktemp("single") / "run"
    train(*tiny_overrides, *WORKERS, f"output_dir={run}")
    return run


def assert_same_end(run: Path, expected: Path) -> None:
    """The final state and the losses on the way are equal to the last bit."""
    ours, theirs = (torch.load(path / "final.pt", weights_only=True) for path in (run, expected))
    for arena in STATE:
        assert torch.equal(ours[arena], theirs[arena]), arena
    assert ours["position"] == theirs["position"]
    losses = [
        [
            (row["update"], row["loss"], row["local_losses"])
            for row in numbers_of(path)
            if row["event"] == "train"
        ]
        for path in (run, expected)
    ]
    assert losses[0] == losses[1]


LOSSES = {
    "rank 1 is killed": (1, signal.SIGKILL),
    "rank 0 is killed": (0, signal.SIGKILL),
    "rank 1 is stopped": (1, signal.SIGSTOP),
    "rank 0 is stopped": (0, signal.SIGSTOP),
}


@dataclass
class Loss:
    """How a run of two ends that lost one: the survivor's exit code (None: it did not end) and its words."""

    run: Path
    code: int | None
    errors: list[str]
    said: list[str]
    status: str


@pytest.fixture(scope="module")
def losses(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loss]:
    """All of LOSSES, side by side, since what takes long is waiting."""
    companies = {
        name: Company.of_two(tmp_path_factory.mktemp("lost"), *tiny_overrides, *WORKERS, OFTEN, TIMEOUT)
        for name in LOSSES
    }
    try:
        for name, (rank, number) in LOSSES.items():
            company = companies[name]
            company.wait_for_middle()
            company.wait_for((company.run / "recovery.pt").exists)
            company.send(rank, number)
        deadline = time.monotonic() + TIMEOUT_SECONDS + 15
        found = {}
        for name, (rank, _) in LOSSES.items():
            company, survivor = companies[name], companies[name].processes[1 - rank]
            survivor.join(max(0, deadline - time.monotonic()))
            words = company.errors(1 - rank), company.said(1 - rank)
            found[name] = Loss(company.run, survivor.exitcode, *words, status_of(company.run))
    finally:
        for company in companies.values():
            company.end()
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_the_other_rank_soon_ends_with_one_line_that_names_the_lost_one(
    name: str, losses: dict[str, Loss]
) -> None:
    loss, (lost, _) = losses[name], LOSSES[name]
    assert loss.code is not None, "it still waits"
    assert loss.code == 2
    assert len(loss.errors) == 1, loss.errors
    assert loss.errors[0].startswith(f"error: rank {1 - lost}: rank {lost} ")
    assert loss.status == "failed"


@pytest.mark.parametrize("name", LOSSES)
def test_the_line_is_not_buried_under_stack_traces(name: str, losses: dict[str, Loss]) -> None:
    assert len(losses[name].said) <= 2, f"{len(losses[name].said)} lines"


@pytest.mark.parametrize("name", LOSSES)
def test_what_two_ranks_left_goes_on_in_one_process_to_the_same_bits(
    name: str, losses: dict[str, Loss], single: Path
) -> None:
    run = losses[name].run
    assert not (run / "final.pt").exists()
    train(f"resume={run}")
    assert_same_end(run, single)
    assert status_of(run) == "complete"


def test_a_signal_to_one_rank_stops_all_at_one_update_boundary(
    tiny_overrides: list[str], tmp_path: Path, single: Path
) -> None:
    company = Company.of_two(tmp_path, *tiny_overrides, *WORKERS, TIMEOUT)
    company.wait_for_middle()
    company.send(1, signal.SIGTERM)
    assert company.codes() == [143, 143]
    assert status_of(company.run) == "interrupted"
    assert [path.name for path in company.run.glob("*.pt")] == ["recovery.pt"]
    state = torch.load(company.run / "recovery.pt", weights_only=True)
    assert 14 <= state["update"] < 52
    words = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert "interrupted by SIGTERM" in words[0]
    assert "Traceback" not in words[0] + words[1]
    resumed = Company.of_two(tmp_path, f"resume={company.run}")
    assert resumed.codes() == [0, 0]
    assert_same_end(company.run, single)
    assert not (company.run / "recovery.pt").exists()


def test_a_data_parallel_run_that_is_interrupted_goes_on_in_one_process_to_the_same_model(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    overrides = [*tiny_overrides, "training.micro_batch_size=4"]
    train(*overrides, f"output_dir={tmp_path / 'single'}")
    company = Company.of_two(tmp_path, *overrides, TIMEOUT)
    company.wait_for_middle()
    company.send(0, signal.SIGTERM)
    assert company.codes() == [143, 143]
    train(f"resume={company.run}")
    ours, theirs = (
        torch.load(path / "final.pt", weights_only=True) for path in (company.run, tmp_path / "single")
    )
    assert ours["position"] == theirs["position"]
    for arena in STATE:
        assert apart(ours[arena], theirs[arena]) < 1e-5, arena
    losses = [[row["loss"] for row in rows_of(run)] for run in (company.run, tmp_path / "single")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def rank_of(pid: int) -> int | None:
    """Return the rank that a process's starter gave it."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return None
    return next((int(word.removeprefix("RANK=")) for word in words if word.startswith("RANK=")), None)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found


def test_torchrun_starts_killed_ranks_again_and_the_run_ends_as_if_nothing_had_been(
    tiny_overrides: list[str], tmp_path: Path, single: Path
) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--max-restarts=1", "-m", "tiny_llm.train", *tiny_overrides, *WORKERS]
    often = ["training.recovery_minutes=0.002", "runtime.timeout_seconds=10"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (
        open(tmp_path / "said", "w") as said,
        subprocess.Popen([*command, *often], cwd=tmp_path, env=environment, stdout=said, stderr=said) as job,
    ):
        try:
            kill_when_saved(job, tmp_path / "outputs", rank=1)
            code = job.wait(120)
        finally:
            job.terminate()
    assert code == 0, (tmp_path / "said").read_text()[-3000:]
    (run,) = [path.parent for path in tmp_path.rglob("status.json")]
    assert run.parents[1] == tmp_path / "outputs"
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert len(starts) == 2
    assert_same_end(run, single)


def kill_when_saved(job: subprocess.Popen[bytes], outputs: Path, rank: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and job.poll() is None:
        if list(outputs.rglob("recovery.pt")):
            (victim,) = [pid for pid in children(job.pid) if rank_of(pid) == rank]
            os.kill(victim, signal.SIGKILL)
            return
        time.sleep(0.01)
    raise AssertionError("no recovery.pt came")


def test_ranks_that_were_told_different_things_say_what_and_start_nothing(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    company = Company.of_two(
        tmp_path, *tiny_overrides, *WORKERS, TIMEOUT, "optimizer.lr=0.01", second=["optimizer.lr=0.02"]
    )
    assert company.codes() == [2, 2]
    for rank in range(2):
        (line,) = company.errors(rank)
        assert line.startswith(f"error: rank {rank}: the ranks differ in optimizer.lr: 0.01 on rank 0, 0.02 ")
    assert not company.run.exists()


def test_workers_that_ranks_cannot_share_out_are_refused_on_all(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    company = Company.of_two(tmp_path, *tiny_overrides, "decentralized=awc", "decentralized.num_models=3")
    assert company.codes() == [2, 2]
    for rank in range(2):
        (line,) = company.errors(rank)
        assert "decentralized.num_models=3 cannot be divided among 2 ranks; start 1 or 3 ranks" in line
    assert not company.run.exists()


def test_a_sweep_is_not_started_by_several_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiny_llm.train", "-m", "optimizer.lr=0.1,0.2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environments(2)[1]}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: rank 1: -m hands each point to a launcher")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def look_seldom(ranks: Ranks) -> None:
    """Have the other rank look once a second, and just before the first says that it is done."""
    ranks_module.POLL_SECONDS = 1.0 if ranks.rank else 0.01
    if ranks.first:
        time.sleep(0.3)


def test_the_first_rank_leaves_when_the_others_have(tmp_path: Path) -> None:
    """It keeps the store: without it the others would take the run's good end for a loss."""
    processes = start_ranks(2, tmp_path, look_seldom, first_lingers=False)
    for process in processes:
        process.join(30)
        process.kill()
    assert outcome(tmp_path, 1) is None


def stopped_while_saving(ranks: Ranks) -> None:
    """Stop the first rank while the others wait for what it does alone."""
    ranks.told(None)
    with ranks.first_alone():
        if ranks.first:
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_first_rank_that_is_stopped_while_the_others_wait_for_its_word_is_missed(tmp_path: Path) -> None:
    first, other = start_ranks(2, tmp_path, stopped_while_saving, timeout_seconds=TIMEOUT_SECONDS)
    other.join(TIMEOUT_SECONDS + 15)
    waits = other.is_alive()
    for process in (first, other):
        process.kill()
        process.join()
    assert not waits
    said = (tmp_path / "rank-1.err").read_text()
    if (tmp_path / "rank-1.pt").exists():
        with pytest.raises(RuntimeError) as caught:
            outcome(tmp_path, 1)
        said += str(caught.value)
    assert "rank 0 has shown no sign of life" in said


def speak_after_the_first_was_killed(ranks: Ranks) -> None:
    ranks.told(None)
    if ranks.first:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    ranks.words("is anybody there?")


def test_a_rank_that_speaks_after_the_first_was_killed_names_it(tmp_path: Path) -> None:
    _, other = start_ranks(
        2, tmp_path, speak_after_the_first_was_killed, timeout_seconds=TIMEOUT_SECONDS, first_lingers=False
    )
    other.join(TIMEOUT_SECONDS + 15)
    other.kill()
    with pytest.raises(RuntimeError, match="RankLostError: rank 0 "):
        outcome(tmp_path, 1)


def test_a_recovery_state_that_cannot_be_saved_is_a_warning_and_the_ranks_train_on(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run/recovery.pt/in the way").mkdir(parents=True)
    company = Company.of_two(tmp_path, *tiny_overrides, *WORKERS, OFTEN, TIMEOUT)
    try:
        company.wait_for(lambda: len(rows_of(company.run)) >= 5, seconds=20)
        assert "warning: " in (company.run / "run.log").read_text()
    finally:
        company.end()
