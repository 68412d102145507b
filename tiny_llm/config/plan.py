"""The Plan: everything that follows from a config before anything runs.

Derived once and read by the trainer, adaptive consensus, resume, the benchmark, reports and tests: parameter
count, updates, epoch boundaries, learning rates, gamma, memory. `dry_run=true` prints it as JSON.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tiny_llm.config import memory
from tiny_llm.config.budget import epoch_boundaries
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.parameters import count_parameters, parameter_counts
from tiny_llm.config.rates import first_adaptive_update, lr_factor, mixing_gamma
from tiny_llm.config.schema import Config, DataConfig


@dataclass(frozen=True)
class Plan:
    """What a config implies. Updates are zero-based, `epoch_boundaries` cumulative updates done."""

    config: Config
    parameters: int
    epoch_boundaries: tuple[int, ...]
    micro_batch_size: int
    ranks: int = 1

    @property
    def num_models(self) -> int:
        return self.config.decentralized.num_models

    @property
    def batch_sequences(self) -> int:
        return self.config.training.batch_tokens // self.config.model.context_length

    @property
    def data_parallel(self) -> bool:
        """Whether all ranks train one model together."""
        return self.ranks > 1 and self.num_models == 1

    def workers(self, rank: int) -> range:
        """Return the workers that `rank` holds."""
        share = max(1, self.num_models // self.ranks)
        return range(1) if self.num_models == 1 else range(rank * share, (rank + 1) * share)

    @property
    def rows_at_once(self) -> int:
        """Sequences of one micro-batch, over all workers and ranks."""
        return max(self.num_models, self.ranks) * self.micro_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches a worker, or a data-parallel rank, adds up in one update."""
        return self.batch_sequences // self.rows_at_once

    @property
    def updates(self) -> int:
        return self.epoch_boundaries[-1]

    @property
    def tokens(self) -> int:
        """Training targets of the whole run, over all workers."""
        return self.updates * self.config.training.batch_tokens

    def epoch_of(self, update: int) -> int:
        """Return the one-based epoch that the zero-based `update` belongs to."""
        return next(e for e, boundary in enumerate(self.epoch_boundaries, 1) if update < boundary)

    def keeps_epoch(self, epoch: int) -> bool:
        """Whether the weights at the end of the one-based `epoch` are kept."""
        policy, epochs = self.config.training.checkpoint_policy, self.config.training.checkpoint_epochs
        if isinstance(epochs, int):
            return policy == "interval" and epoch % epochs == 0
        return policy == "explicit" and epoch in epochs

    def lr(self, update: int) -> float:
        return self.config.optimizer.lr * lr_factor(self.config.schedule, update + 1, self.updates)

    def gamma(self, update: int) -> float:
        """Return how strongly the zero-based `update` mixes: W' = gamma W + (1 - gamma) I."""
        adaptive = self.config.adaptive_consensus
        if update < first_adaptive_update(adaptive, self.updates):
            return 1.0
        return mixing_gamma(adaptive, self.lr(update), self.largest_active_lr)

    @functools.cached_property
    def largest_active_lr(self) -> float:
        """The largest rate of the updates in which gamma follows the rate; 0 when there are none."""
        start = first_adaptive_update(self.config.adaptive_consensus, self.updates)
        return max((self.lr(update) for update in range(start, self.updates)), default=0.0)

    def mixes(self, update: int) -> bool:
        return self.num_models > 1 and (update + 1) % self.config.decentralized.mix_every == 0

    def mixing_step(self, update: int) -> int:
        """Return t, how many mixing steps came before that of the zero-based `update`."""
        return (update + 1) // self.config.decentralized.mix_every - 1

    @property
    def targets_needed(self) -> int:
        """Training targets that data.max_passes must offer for `tokens` of them: each pass reads whole sequences."""
        sequences = self.config.data.max_passes * self.config.model.context_length
        return -(-self.tokens // sequences) * sequences

    @property
    def cache_tokens_needed(self) -> int:
        return cache_tokens(self.config.data, self.targets_needed)

    @property
    def memory_bytes(self) -> int:
        """An estimate for each of the run's processes."""
        return memory.training_bytes(self.config, self.micro_batch_size, self.ranks)

    def parameter_summary(self) -> dict[str, int]:
        """Return the parameters of one model, in all and by place (Kaplan et al. 2020: positions embed, too)."""
        counts = parameter_counts(self.config.model)
        return {
            "parameters": self.parameters,
            "non_embedding_parameters": self.parameters - counts.embedding,
            "embedding_parameters": counts.embedding,
            "head_parameters": counts.head,
            "core_parameters": counts.core,
        }

    def summary(self) -> dict[str, Any]:
        """Return the Plan as plain data."""
        rate_points = {f"{q}%": self.lr(round((self.updates - 1) * q / 100)) for q in (0, 25, 50, 75, 100)}
        return {
            **self.parameter_summary(),
            "num_models": self.num_models,
            "ranks": self.ranks,
            "batch_tokens": self.config.training.batch_tokens,
            "micro_batch_size": self.micro_batch_size,
            "accumulation": self.accumulation,
            "updates": self.updates,
            "epochs": len(self.epoch_boundaries),
            "epoch_boundaries": list(self.epoch_boundaries),
            "tokens": self.tokens,
            "warmup_updates": min(self.config.schedule.warmup_steps, self.updates),
            "learning_rates": rate_points,
            "first_adaptive_update": first_adaptive_update(self.config.adaptive_consensus, self.updates),
            "memory_bytes": self.memory_bytes,
            "cache_tokens_needed": self.cache_tokens_needed,
        }


def cache_tokens(data: DataConfig, targets: int) -> int:
    """Training tokens of a cache for that many targets over all passes: whole shuffle groups and one token."""
    group = data.shuffle_group_size * data.shard_tokens
    return max(1, -(-targets // (data.max_passes * group))) * group + 1


def make_plan(config: Config, ranks: int = 1) -> Plan:
    """Derive the Plan of a run on `ranks` processes. Raises ConfigError where the numbers do not fit together."""
    parameters = count_parameters(config.model)
    boundaries = epoch_boundaries(config.training, parameters)
    plan = Plan(config, parameters, boundaries, _micro_batch_size(config, ranks), ranks)
    epochs = config.training.checkpoint_epochs
    listed = () if isinstance(epochs, int) else epochs
    if config.training.checkpoint_policy == "explicit" and max(listed, default=0) > len(boundaries):
        raise ConfigError(
            f"training.checkpoint_epochs={list(listed)}: the run has {len(boundaries)} epochs; name epochs from 1 "
            f"to {len(boundaries)}"
        )
    adaptive = config.adaptive_consensus
    if (
        adaptive.p
        and first_adaptive_update(adaptive, plan.updates) < plan.updates
        and not plan.largest_active_lr
    ):
        raise ConfigError(
            f"adaptive_consensus.p={adaptive.p:g}: the learning rate is 0 in every update from "
            f"start_frac={adaptive.start_frac:g} on, so gamma is undefined; lower adaptive_consensus.start_frac"
        )
    return plan


def settled(config: Config, plan: Plan) -> Config:
    """Return the config with what the Plan derived written in, so that a resumed run derives it no more."""
    return replace(config, training=replace(config.training, micro_batch_size=plan.micro_batch_size))


def _micro_batch_size(config: Config, ranks: int) -> int:
    training, length, workers = config.training, config.model.context_length, config.decentralized.num_models
    if workers > 1 and workers % ranks:
        raise ConfigError(
            f"decentralized.num_models={workers} cannot be divided among {ranks} ranks; "
            f"start {' or '.join(str(d) for d in memory.divisors(workers))} ranks"
        )
    unit = length * max(workers, ranks)
    if training.batch_tokens % unit:
        low = training.batch_tokens // unit * unit
        what = "decentralized.num_models * " if workers > 1 else "ranks * " if ranks > 1 else ""
        what += "model.context_length"
        raise ConfigError(
            f"training.batch_tokens={training.batch_tokens}: expected a multiple of {what} = {unit}; "
            f"the nearest are {f'{low} and ' if low else ''}{low + unit}"
        )
    sequences = training.batch_tokens // unit
    if workers > 1:
        return _packed_micro_batch_size(training.micro_batch_size, sequences, unit)
    if training.micro_batch_size is None:
        return memory.largest_micro_batch(config, sequences, ranks)
    if sequences % training.micro_batch_size:
        raise ConfigError(
            f"training.micro_batch_size={training.micro_batch_size} does not divide the {sequences} sequences of an "
            f"update; allowed: {', '.join(str(d) for d in memory.divisors(sequences))}"
        )
    return training.micro_batch_size


def _packed_micro_batch_size(requested: int | None, sequences: int, unit: int) -> int:
    """With several workers an update is exactly one micro-batch of each."""
    if requested not in (None, sequences):
        raise ConfigError(
            f"training.micro_batch_size={requested}: with several workers batch_tokens is num_models * "
            f"micro_batch_size * context_length, so set training.micro_batch_size={sequences} (or null), or "
            f"training.batch_tokens={unit * int(requested or 1)}"
        )
    return sequences
