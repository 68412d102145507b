"""A process finds its place among ranks in what its starter put into the environment."""

from __future__ import annotations

import pytest

from tiny_llm.config.errors import UserError
from tiny_llm.config.placement import Placement, find_placement, torchrun_started

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_without_a_starter_a_process_is_alone() -> None:
    assert find_placement({}) == Placement(0, 1, 0, 1, 0)
    assert find_placement({}).first


def test_torchruns_words_are_taken() -> None:
    assert find_placement(TORCHRUN) == Placement(5, 8, 1, 4, restarts=2)
    assert not find_placement(TORCHRUN).first
    assert find_placement({**TORCHRUN, "RANK": "0"}).first


def test_ranks_started_by_hand_need_no_more_than_a_rank_and_a_size() -> None:
    assert find_placement({"RANK": "1", "WORLD_SIZE": "2"}) == Placement(1, 2, 1, 2)


def test_each_task_of_a_slurm_step_is_a_rank() -> None:
    assert find_placement(STEP) == Placement(5, 8, 1, 4)


@pytest.mark.parametrize(("tasks", "first"), [("8", 8), ("4(x2)", 4), ("3,2", 3), ("2(x3),1", 2)])
def test_a_steps_tasks_on_a_node_are_read_as_slurm_writes_them(tasks: str, first: int) -> None:
    assert find_placement({**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks}).local_world == first


def test_the_batch_step_of_a_job_of_many_tasks_is_alone() -> None:
    """sbatch --ntasks=4 runs its script once, with SLURM_NTASKS=4, in a step of one task."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find_placement(batch) == Placement()
    assert find_placement({**batch, "SLURM_STEP_NUM_TASKS": "1"}) == Placement()


def test_torchrun_inside_a_slurm_step_has_the_word() -> None:
    """One torchrun a node is a step of its own, whose numbers are not those of the ranks."""
    step = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert find_placement({**step, **TORCHRUN}) == Placement(5, 8, 1, 4, restarts=2)


def test_a_world_of_one_is_alone() -> None:
    assert find_placement({"RANK": "0", "WORLD_SIZE": "1"}) == Placement()


@pytest.mark.parametrize("starter", ["TORCHELASTIC", "SLURM"])
def test_attempts_are_counted_by_whoever_starts_anew(starter: str) -> None:
    counted = {f"{starter}_RESTART_COUNT": "3"}
    assert find_placement(counted) == Placement(restarts=3)
    assert find_placement({"RANK": "0", "WORLD_SIZE": "2", **counted}).restarts == 3
    assert find_placement({**STEP, **counted}).restarts == 3


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 but RANK is not set: expected 0 to 3; .*torchrun or srun"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "WORLD_SIZE=4 but RANK is 4: expected 0 to 3"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two: expected an integer"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1: expected an integer"),
        ({**STEP, "SLURM_PROCID": "8"}, "SLURM_PROCID"),
        ({key: value for key, value in STEP.items() if key != "SLURM_PROCID"}, "SLURM_PROCID"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT=x"),
    ],
)
def test_contradictions_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_placement(environment)


def test_without_torchrun_there_is_no_start_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun_started() is None
