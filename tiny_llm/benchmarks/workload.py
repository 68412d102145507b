"""What is measured: the trainer itself, on a token cache of random tokens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.plan import Plan, settled
from tiny_llm.config.schema import Config
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.manifest import MANIFEST_NAME, byte_settings, seal
from tiny_llm.data.shards import ShardWriter
from tiny_llm.distributed.ranks import Ranks
from tiny_llm.training.device import prepare_torch, settle_runtime
from tiny_llm.training.loop import Trainer
from tiny_llm.training.progress import Progress
from tiny_llm.training.run_directory import Rows, RunDirectory
from tiny_llm.training.signals import StopSignals
from tiny_llm.training.tracking import open_tracker


def flops_a_target(config: Config) -> int:
    """Return the model FLOPs of one training target, forward and backward.

    6 a matmul parameter, a tied head counted once and what is only looked up not at all, and 6 * layers * heads *
    head dimension * context for causal attention (PaLM, Chowdhery et al. 2022, appendix B, halved for the mask).
    """
    model = config.model
    looked_up = {"positions.weight"} if model.tied else {"positions.weight", "embedding.weight"}
    specs = [spec for spec in parameter_specs(model) if len(spec.shape) == 2 and spec.name not in looked_up]
    attention = model.layers * model.heads * model.head_width * model.context_length
    return 6 * sum(spec.numel for spec in specs) + 6 * attention


@contextlib.contextmanager
def trainer_of(plan: Plan, ranks: Ranks | None = None) -> Iterator[Trainer]:
    """Yield a Trainer as `tiny_llm.train` would make it, in a directory of its own and on random tokens."""
    plan = replace(plan, config=settled(settle_runtime(plan), plan))
    device = prepare_torch(plan.config) if ranks is None else ranks.device
    with tempfile.TemporaryDirectory() as place, open(Path(place) / "run.log", "w") as log:
        cache = random_cache(Path(place) / "cache", plan)
        directory = RunDirectory(Path(place) / "run")
        with directory.locked(), contextlib.closing(Rows(directory / "metrics.jsonl")) as metrics:
            tracker = open_tracker("none", directory.path, {}, "benchmark", 0)
            trainer = Trainer(plan, directory, cache, device, metrics, tracker, StopSignals(), ranks)
            trainer.progress = Progress(plan.updates, plan.tokens, 0, stream=log)
            yield trainer


def random_cache(directory: Path, plan: Plan) -> TokenCache:
    """Write a cache of random tokens, enough for one shuffle group and an evaluation."""
    config = plan.config
    data = config.data
    generator = np.random.default_rng(0)
    directory.mkdir()
    splits = {}
    evaluated = config.evaluation.subset_blocks * config.model.context_length + 1
    for split, tokens in (("train", 4_000_000), ("validation", evaluated)):
        writer = ShardWriter(directory, split, data.shard_tokens, data.vocab_size)
        writer.write(generator.integers(0, data.vocab_size, tokens).astype(np.uint16), 1)
        splits[split] = writer.finish()
    manifest = {
        "tokenizer": {"fingerprint": ""},
        "vocab_size": data.vocab_size,
        "eos_id": 0,
        "shard_tokens": data.shard_tokens,
        "settings": byte_settings(data),
        "splits": splits,
        "exhausted": True,
    }
    (directory / MANIFEST_NAME).write_bytes(seal(manifest))
    return TokenCache.open(directory, data)
