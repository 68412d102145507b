"""The cluster that tests/slurm/cluster.sh starts, and a launcher that submits to it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeping import Launcher

CONF = Path("/tmp/tiny_llm_slurm/slurm.conf")
START = "start it as root with tests/slurm/cluster.sh start"


@pytest.fixture(scope="session")
def cluster() -> Path:
    """Return the settings file of the running cluster; skip without one, or fail where it is required."""
    script = Path(__file__).parent / "cluster.sh"
    if subprocess.run([script, "status"], capture_output=True).returncode == 0:
        return CONF
    if os.environ.get("TINY_LLM_REQUIRE_SLURM"):
        pytest.fail(f"SLURM is not up, and TINY_LLM_REQUIRE_SLURM wants these tests run: {START}")
    pytest.skip(f"SLURM is not up: {START}")


@pytest.fixture
def slurm(cluster: Path, tmp_path: Path, tiny_overrides: list[str]) -> Iterator[Launcher]:
    """A launcher whose jobs take a core and a pretend GPU each."""
    settings = ["hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.gpus_per_node=1"]
    settings += ["hydra.launcher.signal_delay_s=10", f"hydra.launcher.name={tmp_path.name}", "sweep_name=s"]
    one = Launcher(tmp_path, [*tiny_overrides, *settings], SLURM_CONF=str(cluster))
    yield one
    one.kill_all()
    subprocess.run(["scancel", f"--name={tmp_path.name}"], env=one.environment, check=False)
