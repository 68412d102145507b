"""One small trained run of each family, single and packed, shared by the tests of this room."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from trained_runs import FAMILIES, RunOf


@pytest.fixture(autouse=True, scope="module")
def _no_pictures() -> Iterator[None]:
    """Drawing loss.png takes as long as all updates of these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_llm.training.loop.plot_run", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def run_of(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Return the directory of a trained run by family and number of workers, training it when first asked."""
    from tiny_llm.config.compose import compose
    from tiny_llm.train import train

    runs: dict[tuple[str, int], Path] = {}

    def run(family: str, workers: int) -> Path:
        if (family, workers) not in runs:
            path = tmp_path_factory.mktemp(f"{family}-{workers}") / "run"
            overrides = [text for text in tiny_overrides if text != "model=tiny"] + FAMILIES[family]
            overrides += ["training.checkpoint_policy=interval", f"output_dir={path}"]
            if workers > 1:
                overrides += ["decentralized=awc", f"decentralized.num_models={workers}", "topology=complete"]
            train(compose(overrides))
            runs[family, workers] = path
        return runs[family, workers]

    return run
