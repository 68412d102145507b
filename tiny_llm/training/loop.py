"""The training loop: updates, validation, checkpoints and rows, from a fresh start or a saved state.

`Trainer.train` reads top to bottom: advance; at an epoch's end validate and checkpoint; at any update
boundary heed signals and the recovery clock; after the last update keep the weights, evaluate in full and
write the result. `start.py` opens everything that it needs.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from tiny_llm import files
from tiny_llm.analysis.curves import plot_run
from tiny_llm.config.errors import is_full, refusal
from tiny_llm.config.plan import Plan
from tiny_llm.config.saved import plain, recipe_identity
from tiny_llm.data.batches import micro_batch, own_rows
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.loader import TrainingStream
from tiny_llm.decentralized.consensus import consensus_error
from tiny_llm.distributed.ranks import Ranks, alone
from tiny_llm.training.checkpoint import CheckpointError, State, save_state
from tiny_llm.training.engine import Engine, MicroBatch, UpdateResult
from tiny_llm.training.evaluation import Evaluation, Evaluator
from tiny_llm.training.progress import Progress
from tiny_llm.training.run_directory import Rows, RunDirectory
from tiny_llm.training.sampling import sample_rows
from tiny_llm.training.signals import Interrupted, StopSignals
from tiny_llm.training.tracking import Tracker
from tiny_llm.training.worker_files import save_epoch


class Window:
    """Each worker's losses since the last train row, added up."""

    def __init__(self, sums: list[float], updates: int = 0) -> None:
        self.sums = sums
        self.updates = updates

    def add(self, losses: list[float]) -> None:
        self.sums = [total + loss for total, loss in zip(self.sums, losses, strict=True)]
        self.updates += 1

    def means(self) -> list[float]:
        return [total / self.updates for total in self.sums]


class Trainer:
    """One run, or one rank's part in it. Construct it, maybe `restore` a state, then `train`.

    Of several ranks all do the same in the same order; the first alone writes.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        cache: TokenCache,
        device: torch.device,
        metrics: Rows,
        tracker: Tracker,
        signals: StopSignals,
        ranks: Ranks | None = None,
    ) -> None:
        self.plan, self.config, self.directory = plan, plan.config, directory
        self.cache, self.device = cache, device
        self.metrics, self.tracker, self.signals = metrics, tracker, signals
        self.samples = Rows(directory / "samples.jsonl")
        self.ranks = ranks or alone(device)
        self.engine = Engine(plan, device, self.ranks)
        self.evaluator = Evaluator(self.config, cache, device, self.ranks)
        self._own_rows = own_rows(plan, self.ranks.rank)
        self.update = 0  # updates done
        self.epochs_validated = 0
        self.tokens = 0
        self.seconds = 0.0  # spent in updates, over all starts
        self.data_seconds = 0.0
        self.best: dict[str, Any] | None = None
        self.window = Window([0.0] * plan.num_models)
        self._window_start = (0, 0.0)  # tokens and seconds at the last row
        self._position = 0

    def restore(self, state: State) -> None:
        """Go on from a training state, which `start.py` has checked, whatever placement saved it."""
        engine = self.engine
        for name, arena in engine.arenas().items():
            arena.copy_(state[name][engine.workers.start : engine.workers.stop])
        engine.optimizer.updates = self.update = state["update"]
        self.epochs_validated, self.best = state["epochs_validated"], state["best"]
        self.tokens, self.seconds, self.data_seconds = (
            state["tokens"],
            state["seconds"],
            state["data_seconds"],
        )
        self.window = Window(state["window_sums"], state["window_updates"])
        self._window_start = tuple(state["window_start"])
        self._position = state["position"]
        torch.set_rng_state(state["rng"])

    def state(self) -> State | None:
        """Return everything that `restore` wants, as plain data and tensors, on the first rank.

        The others get None. Raises ReplicaError when data-parallel ranks differ.
        """
        arenas = self.engine.collected()
        if arenas is None:
            return None
        return {
            "config": plain(self.config),
            "identity": {"recipe": recipe_identity(self.config), "data": self.cache.identity},
            "layout": self.engine.model.layout.plain(),
            **arenas,
            "update": self.update,
            "epochs_validated": self.epochs_validated,
            "best": self.best,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data_seconds": self.data_seconds,
            "window_sums": self.window.sums,
            "window_updates": self.window.updates,
            "window_start": list(self._window_start),
            "position": self._position,
            "rng": torch.get_rng_state(),
        }

    def with_history(self, state: State | None) -> State:
        """Return the first rank's state with the length of every file of rows that it goes with.

        Raises CheckpointError where rows that wait still do not fit.
        """
        try:
            rows = {
                "metrics_bytes": self.metrics.synced_bytes(),
                "samples_bytes": self.samples.synced_bytes(),
            }
        except OSError as error:
            refused = refusal(error)
            reason = refused[1] if refused else str(error)
            raise CheckpointError(f"{error.filename}, which a checkpoint goes with: {reason}") from None
        return {**(state or {}), **rows}

    def train(self, progress: Progress) -> dict[str, Any]:
        """Train to the end and return the result. Raises Interrupted, after saving, and UserError."""
        self.progress = progress
        self._last_saved = time.monotonic()
        with closing(self.samples):
            with closing(self.open_stream()) as stream:
                self._heed_signals_and_clock()
                self._finish_epoch_if_due()
                while self.update < self.plan.updates:
                    self.advance(stream)
                    self._heed_signals_and_clock()
                    self._finish_epoch_if_due()
            return self._finish()

    def open_stream(self) -> TrainingStream:
        """Return the training sequences from where this run stands; close it in the end."""
        data = self.config.data
        return TrainingStream(
            self.cache,
            self.config.model.context_length,
            data.shuffle_group_size,
            self.config.runtime.seed,
            data.max_passes,
            data.prefetch,
            self._position,
        )

    def advance(self, stream: TrainingStream) -> None:
        """Do one update: load, train, count, and log where a row is due."""
        self.ranks.at_update(self.update)
        start = time.perf_counter()
        result = self.engine.update(self.update, lambda: self._next_micro_batch(stream))
        self.update += 1
        row_due = self.update % self.config.training.log_every == 0 or self.update == self.plan.updates
        if self.device.type == "cuda" and (row_due or self.update in self.plan.epoch_boundaries):
            torch.cuda.synchronize(self.device)  # else rows and validation would wait for it, uncounted
        self.seconds += time.perf_counter() - start
        self._position = stream.position
        self.tokens += self.config.training.batch_tokens
        self.window.add(result.losses)
        if row_due:
            self._log_train_row(result)
        self.progress.tick(self.update, self.tokens)

    def _next_micro_batch(self, stream: TrainingStream) -> MicroBatch:
        start = time.perf_counter()
        rows = stream.next_rows(self.plan.rows_at_once, self._own_rows)
        batch = micro_batch(rows, self.device)
        self.data_seconds += time.perf_counter() - start
        return batch

    def _log_train_row(self, result: UpdateResult) -> None:
        tokens, seconds = self._window_start
        losses, last = self.window.means(), self.update - 1
        row = {
            "event": "train",
            "update": self.update,
            "epoch": self.plan.epoch_of(last),
            "tokens": self.tokens,
            "loss": sum(losses) / len(losses),
            "lr": self.plan.lr(last),
            "grad_norm": sum(result.norms) / len(result.norms),
            "tokens_per_second": (self.tokens - tokens) / max(self.seconds - seconds, 1e-9),
            "seconds": self.seconds,
            "data_seconds": self.data_seconds,
            "memory_bytes": self._peak_memory(),
        }
        if self.config.decentralized.scheme != "off":
            row |= self._decentralized_columns(losses, result, last)
        self._record(row)
        self.progress.train(row)
        self.window = Window([0.0] * self.plan.num_models)
        self._window_start = (self.tokens, self.seconds)

    def _decentralized_columns(self, losses: list[float], result: UpdateResult, last: int) -> dict[str, Any]:
        rows = self.engine.model.parameter_storage
        error, relative = consensus_error(rows, self.plan.num_models, self.ranks.sum_)
        return {
            "local_losses": losses,
            "local_grad_norms": result.norms,
            "tokens_per_model": self.tokens // self.plan.num_models,
            "mixing_step": self.plan.mixing_step(last),
            "mixing_gamma": self.plan.gamma(last),
            "consensus_error": error,
            "relative_consensus_error": relative,
        }

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _record(self, row: dict[str, Any]) -> None:
        self.metrics.append([row], self.progress.say)
        self.tracker.log(row)

    def _finish_epoch_if_due(self) -> None:
        """At an epoch's end that was not validated yet: validate, remember the best, checkpoint."""
        epoch = self.epochs_validated + 1
        if epoch > len(self.plan.epoch_boundaries) or self.update < self.plan.epoch_boundaries[epoch - 1]:
            return
        weights = self.engine.average_weights()
        try:
            evaluation = self.evaluator.subset(weights, self._stop_if_asked)
        except Interrupted:
            self._save_recovery()
            raise
        row = self._validation_row("validation", epoch, evaluation)
        facts = {"epoch": epoch, "update": self.update, "tokens": self.tokens}
        self._by_first(
            lambda: self.samples.append(
                sample_rows(self.config, weights, self.cache, facts), self.progress.say
            )
        )
        self._record(row)
        self.progress.validation(row)
        self.epochs_validated = epoch
        kept = self.plan.keeps_epoch(epoch)
        if self.best is None or evaluation.loss < self.best["loss"]:
            name = f"epoch-{epoch:03d}.safetensors" if kept else None
            self.best = {"loss": evaluation.loss, "epoch": epoch, "update": self.update, "weights": name}
        if kept:
            self._save_epoch(epoch)
        if self.best["epoch"] == epoch:
            self._by_first(self._publish_best)

    def _publish_best(self) -> None:
        try:
            files.write_json(self.directory / "best.json", self.best)
        except OSError as error:
            if not is_full(error):
                raise
            self.progress.say(f"warning: {self.directory / 'best.json'}: the disk is full; it is tried again")

    def _validation_row(self, event: str, epoch: int, evaluation: Evaluation) -> dict[str, Any]:
        return {
            "event": event,
            "update": self.update,
            "epoch": epoch,
            "tokens": self.tokens,
            "loss": evaluation.loss,
            "targets": evaluation.targets,
            "seconds": self.seconds,
        }

    def _save_epoch(self, epoch: int) -> None:
        state = self.state()
        weights_alone = not self.config.training.save_epoch_training_state
        self._by_first(
            lambda: save_epoch(
                self.directory / f"epoch-{epoch:03d}",
                self.with_history(state),
                self.engine.model.layout,
                weights_alone,
            )
        )

    def _by_first(self, work: Callable[[], None]) -> None:
        """Have the first rank do what is to be done once, while the others wait however long it takes."""
        with self.ranks.first_alone():
            if self.ranks.first:
                work()

    def _stop_if_asked(self) -> None:
        """Raise Interrupted on all ranks when one of them has received a signal."""
        (signal,) = self.ranks.largest(self.signals.received or 0)
        if signal:
            raise Interrupted(int(signal))

    def _heed_signals_and_clock(self) -> None:
        """Save and stop if any rank was asked to; save if the first rank's clock says so."""
        minutes = self.config.training.recovery_minutes
        late = minutes is not None and time.monotonic() - self._last_saved >= 60 * minutes
        signal, due = self.ranks.largest(self.signals.received or 0, late and self.ranks.first)
        if signal or due:
            self._save_recovery()
            self._last_saved = time.monotonic()
        if signal:
            raise Interrupted(int(signal))

    def _save_recovery(self) -> None:
        training = self.config.training
        if training.checkpoint_policy != "none" or training.recovery_minutes is not None:
            try:
                self._save("recovery.pt")
            except CheckpointError as error:
                self.progress.say(f"warning: {error}")  # the run can go on, or end as it was asked to

    def _save(self, name: str) -> None:
        state = self.state()
        self._by_first(lambda: save_state(self.directory / name, self.with_history(state)))

    def _finish(self) -> dict[str, Any]:
        """Keep the final weights, evaluate on the whole split, write the result and the picture."""
        if self.config.training.checkpoint_policy != "none":
            self._save("final.pt")
            self._by_first(lambda: (self.directory / "recovery.pt").unlink(missing_ok=True))
        evaluation = self.evaluator.full(self.engine.average_weights(), self._stop_if_asked)
        row = self._validation_row("final_validation", self.epochs_validated, evaluation)
        self._record(row)
        self.progress.validation(row)
        result = {
            "final_validation_loss": evaluation.loss,
            "final_validation_targets": evaluation.targets,
            "best": self.best,
            **self.plan.parameter_summary(),
            "updates": self.update,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data_seconds": self.data_seconds,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "memory_bytes": self._peak_memory(),
            "ranks": self.ranks.world,
            "identity": {"recipe": recipe_identity(self.config), "data": self.cache.identity},
        }
        self._by_first(lambda: self._publish_result(result))
        return result

    def _publish_result(self, result: dict[str, Any]) -> None:
        for rows in (self.metrics, self.samples):
            rows.synced_bytes()
        files.write_json(self.directory / "best.json", self.best)
        files.write_json(self.directory / "result.json", result)
        try:
            self._plot()
        except (OSError, ValueError) as error:
            self.progress.say(f"warning: loss.png could not be drawn: {error}")

    def _plot(self) -> None:
        events = Counter(row["event"] for row in self.directory.rows())
        if events["train"]:
            title = f"{self.plan.parameters / 1e6:.1f}M parameters, {self.config.data.name}"
            plot_run(self.directory.rows(), self.directory / "loss.png", title)
