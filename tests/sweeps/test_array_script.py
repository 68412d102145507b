"""The sbatch script of a sweep; it is written without a SLURM, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from settings import slurm_settings

from tiny_llm.config.compose import compose
from tiny_llm.config.errors import ConfigError
from tiny_llm.sweeps.array import Array
from tiny_llm.sweeps.points import Point, make_points
from tiny_llm.sweeps.sweep import Sweep


def points(tmp_path: Path, count: int) -> list[Point]:
    return make_points(
        [compose(["data=stdlib", f"runtime.seed={seed}"]) for seed in range(count)], tmp_path, {}
    )


def script(tmp_path: Path, count: int = 3, **changes: Any) -> list[str]:
    sweep = Sweep(tmp_path)
    sweep.jobs_folder.mkdir()
    assert Array(sweep, slurm_settings(dry_run=True, **changes)).rehearses(points(tmp_path, count))
    return (sweep.jobs_folder / "dry_run.sh").read_text().splitlines()


def test_a_dry_run_writes_and_prints_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"partition": "gpu", "gpus_per_node": "a100:1", "mem_gb": 1.5, "setup": ["module load x"]}
    lines = script(
        tmp_path, **settings, array_parallelism=2, additional_parameters={"nice": 5}, comment="mine"
    )
    for line in (
        "#SBATCH --array=0-2%2",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=a100:1",
        "#SBATCH --mem=1536MB",
        "#SBATCH --time=1440",
        "#SBATCH --nice=5",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "module load x",
    ):
        assert line in lines, line
    assert any(line.startswith("#SBATCH --comment='mine ") for line in lines)
    assert "\n".join(lines) in capsys.readouterr().out


def test_the_preemption_signal_is_told_to_slurm_and_to_submitit(tmp_path: Path) -> None:
    lines = script(tmp_path, preempt_signal="USR1", signal_delay_s=30)
    assert "#SBATCH --signal=USR1@30" in lines
    assert "export SUBMITIT_PREEMPT_SIGNAL=USR1" in lines


def test_a_single_point_is_no_array(tmp_path: Path) -> None:
    assert not [line for line in script(tmp_path, count=1) if "--array" in line]


def test_what_the_launcher_decides_cannot_be_set_beside_it(tmp_path: Path) -> None:
    settings = slurm_settings(additional_parameters={"open-mode": "truncate"})
    with pytest.raises(ConfigError, match="open-mode is decided by the launcher"):
        Array(Sweep(tmp_path), settings).check(points(tmp_path, 1))


def test_a_point_that_cannot_be_divided_among_its_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"start it as 3 ranks: training.batch_tokens=.* expected a multiple of ranks"
    ):
        Array(Sweep(tmp_path), slurm_settings(nodes=3)).check(points(tmp_path, 1))


def test_a_machine_without_slurm_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="there is no sbatch here"):
        Array(Sweep(tmp_path), slurm_settings()).check(points(tmp_path, 1))
