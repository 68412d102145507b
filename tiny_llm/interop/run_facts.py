"""What is known of trained weights: the run they come from, its data and how well it did.

In flow a run directory and the checkpoint taken from it; out flow facts for the model card of an export and for
the registry's pages. Losses are those that the run wrote about the mean of its workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_llm import files
from tiny_llm.config.parameters import ParameterCounts, parameter_counts
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.config.schema import Config
from tiny_llm.training.environment import read_starts
from tiny_llm.training.run_directory import RunDirectory
from tiny_llm.training.saved_run import SavedRun


@dataclass(frozen=True)
class RunFacts:
    """One checkpoint of a run. `worker`: whose weights; None: the mean of all workers."""

    config: Config
    plan: Plan
    checkpoint: str
    worker: int | None
    update: int
    corpus: Mapping[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    result: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> ParameterCounts:
        return parameter_counts(self.config.model)

    @property
    def tokens(self) -> int:
        """Training targets that the weights have seen, over all workers."""
        return self.update * self.config.training.batch_tokens

    @property
    def finished(self) -> bool:
        """Whether these are the weights that the run ended with."""
        return bool(self.result) and self.update == self.plan.updates

    def loss(self) -> MeasuredLoss | None:
        """Return what the run measured at this update; the whole split is preferred to the epochs' subset."""
        rows = [row for row in self.rows if row["update"] == self.update and "targets" in row]
        if not rows:
            return None
        best = max(rows, key=lambda row: row["event"] == "final_validation")
        evaluation, over = self.config.evaluation, "the whole split"
        if best["event"] != "final_validation":
            over = f"a subset of at most {evaluation.subset_blocks} blocks (seed {evaluation.seed})"
        return MeasuredLoss(float(best["loss"]), int(best["targets"]), over)

    def summary(self) -> Summary:
        loss, config = self.loss(), self.config
        return Summary(
            checkpoint=self.checkpoint,
            worker=self.worker,
            workers=self.plan.num_models,
            update=self.update,
            training_tokens=self.tokens,
            parameters=self.counts.total,
            core_parameters=self.counts.core,
            training_loss=None if loss is None else loss.nats,
            training_loss_targets=None if loss is None else loss.targets,
            training_loss_over=None if loss is None else loss.over,
            precision=config.runtime.precision,
            context_length=config.model.context_length,
            data_identity=str(self.corpus["identity"]),
            tokens_per_second=self.result.get("tokens_per_second"),
            device=self.environment.get("hardware", {}).get("device_name"),
        )


@dataclass(frozen=True)
class MeasuredLoss:
    """A mean cross-entropy in nats over `targets` held-out targets; `over`: of how much of the split."""

    nats: float
    targets: int
    over: str


@dataclass(frozen=True)
class Summary:
    """The facts that a program wants. The training loss is what the run measured of its workers' mean."""

    checkpoint: str
    worker: int | None
    workers: int
    update: int
    training_tokens: int
    parameters: int
    core_parameters: int
    training_loss: float | None
    training_loss_targets: int | None
    training_loss_over: str | None
    precision: str
    context_length: int
    data_identity: str
    tokens_per_second: float | None
    device: str | None


def run_facts(run: Path, saved: SavedRun, worker: int | None) -> RunFacts:
    """Read what a run directory says about the checkpoint that was opened from it."""
    assert saved.update is not None
    directory = RunDirectory(run)
    result, environment = run / "result.json", run / "environment.json"
    starts = read_starts(environment)
    return RunFacts(
        config=saved.config,
        plan=make_plan(saved.config),
        checkpoint=saved.checkpoint,
        worker=worker,
        update=saved.update,
        corpus=saved.cache.manifest,
        rows=directory.rows(),
        result=files.read_mapping(result) if result.exists() else {},
        environment=starts[-1] if starts else {},
    )
