"""What many tests share: a tiny corpus with its token cache, and a run that takes a second."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from tiny_llm.config.compose import compose
from tiny_llm.config.schema import Config

TINY = [
    "data=text",
    "data.vocab_size=512",
    "data.prepare_workers=1",
    "data.held_out_share=0.2",
    "data.shard_tokens=16384",
    "model=tiny",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.ffn_width=64",
    "model.context_length=32",
    "training.batch_tokens=512",
    "training.micro_batch_size=null",
    "training.tokens_per_parameter=1",
    "training.epoch_tokens_per_parameter=0.25",
    "training.log_every=7",
    "schedule.warmup_steps=5",
    "evaluation.subset_blocks=16",
    "runtime.deterministic=true",
    "runtime.precision=fp32",
    "runtime.threads=1",
    "runtime.device=cpu",
]


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of 52 updates in 4 epochs whose token cache stands."""
    from tiny_llm.data.prepare import ensure_cache

    library = Path(sysconfig.get_path("stdlib"))
    folder = tmp_path_factory.mktemp("corpus")
    for source in sorted(
        [*library.glob("json/*.py"), *library.glob("email/*.py"), *library.glob("logging/*.py")]
    ):
        (folder / f"{source.parent.name}-{source.stem}.txt").write_text(source.read_text())
    paths = f"data.paths=['{folder}/*.txt']"
    overrides = [*TINY, paths, f"data.cache_dir={tmp_path_factory.mktemp('cache')}/text"]
    ensure_cache(compose(overrides).config().data, 0, lambda _: None)
    return overrides


@pytest.fixture(scope="session")
def tiny_config(tiny_overrides: list[str]) -> Config:
    return compose(tiny_overrides).config()
