"""The launcher that the tests of this room use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeping import Launcher


@pytest.fixture
def launcher(tmp_path: Path, tiny_overrides: list[str]) -> Iterator[Launcher]:
    """A launcher of local sweeps, two runs at once with a thread each; ended when the test is over."""
    settings = ["hydra.launcher.max_parallel=2", "hydra.launcher.threads_per_run=1", "sweep_name=s"]
    one = Launcher(tmp_path, [*tiny_overrides, *settings])
    yield one
    one.kill_all()
