"""The training loop: updates, validation, checkpoints and rows, from a fresh start or a saved state.

`Trainer.train` reads top to bottom: advance; at an epoch's end validate and checkpoint; at any update
boundary heed signals and the recovery clock; after the last update keep the weights, evaluate in full and
write the result. `start.py` opens everything that it needs.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from typing import Any

import torch

from tiny_llm import files
from tiny_llm.analysis.curves import plot_run
from tiny_llm.config.plan import Plan
from tiny_llm.config.saved import plain, recipe_identity
from tiny_llm.data.batches import micro_batch
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.loader import TrainingStream
from tiny_llm.decentralized.mixing import consensus_error
from tiny_llm.training.checkpoint import CheckpointError, State, save_state, save_weights
from tiny_llm.training.engine import Engine, MicroBatch, UpdateResult
from tiny_llm.training.evaluation import Evaluation, Evaluator
from tiny_llm.training.progress import Progress
from tiny_llm.training.run_directory import Metrics, RunDirectory
from tiny_llm.training.sampling import sample_rows
from tiny_llm.training.signals import Interrupted, StopSignals
from tiny_llm.training.tracking import Tracker
from tiny_llm.training.worker_files import save_epoch_state, worker_directory


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
    """One run in one process. Construct it, maybe `restore` a state, then `train`."""

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        cache: TokenCache,
        device: torch.device,
        metrics: Metrics,
        tracker: Tracker,
        signals: StopSignals,
    ) -> None:
        self.plan, self.config, self.directory = plan, plan.config, directory
        self.cache, self.device = cache, device
        self.metrics, self.tracker, self.signals = metrics, tracker, signals
        self.engine = Engine(plan, device)
        self.evaluator = Evaluator(self.config, cache, device)
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
        """Go on from a training state, which `start.py` has checked."""
        engine = self.engine
        for arena, saved in (
            (engine.model.parameter_storage, state["parameters"]),
            (engine.optimizer.first_moment_storage, state["first_moment"]),
            (engine.optimizer.second_moment_storage, state["second_moment"]),
        ):
            arena.copy_(saved)
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

    def state(self) -> State:
        """Return everything that `restore` and `start.py` want, as plain data and tensors."""
        engine = self.engine
        return {
            "config": plain(self.config),
            "identity": {"recipe": recipe_identity(self.config), "data": self.cache.identity},
            "layout": engine.model.layout.plain(),
            "parameters": engine.model.parameter_storage,
            "first_moment": engine.optimizer.first_moment_storage,
            "second_moment": engine.optimizer.second_moment_storage,
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
            "metrics_bytes": self.metrics.synced_bytes(),
            "samples_bytes": self.directory.samples_bytes(),
        }

    def train(self, progress: Progress) -> dict[str, Any]:
        """Train to the end and return the result. Raises Interrupted, after saving, and UserError."""
        self.progress = progress
        stream = self.open_stream()
        self._last_saved = time.monotonic()
        try:
            self._stop_if_asked()
            self._finish_epoch_if_due()
            while self.update < self.plan.updates:
                self.advance(stream)
                self._stop_if_asked()
                self._finish_epoch_if_due()
                self._save_recovery_if_due()
        finally:
            stream.close()
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
        start = time.perf_counter()
        result = self.engine.update(self.update, lambda: self._next_micro_batch(stream))
        self.seconds += time.perf_counter() - start
        self.update += 1
        self._position = stream.position
        self.tokens += self.config.training.batch_tokens
        self.window.add(result.losses)
        if self.update % self.config.training.log_every == 0 or self.update == self.plan.updates:
            self._log_train_row(result)
        self.progress.tick(self.update, self.tokens)

    def _next_micro_batch(self, stream: TrainingStream) -> MicroBatch:
        start = time.perf_counter()
        rows = stream.next_rows(self.plan.num_models * self.plan.micro_batch_size)
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
        error, relative = consensus_error(self.engine.model.parameter_storage)
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
        self.metrics.append(row)
        self.tracker.log(row)

    def _finish_epoch_if_due(self) -> None:
        """At an epoch's end that was not validated yet: validate, remember the best, checkpoint."""
        epoch = self.epochs_validated + 1
        if epoch > len(self.plan.epoch_boundaries) or self.update < self.plan.epoch_boundaries[epoch - 1]:
            return
        weights = self.engine.model.average_state_dict()
        try:
            evaluation = self.evaluator.subset(weights, self.signals.check)
        except Interrupted:
            self._save_recovery()
            raise
        row = self._validation_row("validation", epoch, evaluation)
        facts = {"epoch": epoch, "update": self.update, "tokens": self.tokens}
        self.directory.append_samples(sample_rows(self.config, weights, self.cache, facts))
        self._record(row)
        self.progress.validation(row)
        self.epochs_validated = epoch
        kept = self._keeps_epoch(epoch)
        if self.best is None or evaluation.loss < self.best["loss"]:
            name = f"epoch-{epoch:03d}.safetensors" if kept else None
            self.best = {"loss": evaluation.loss, "epoch": epoch, "update": self.update, "weights": name}
        if kept:
            self._save_epoch(epoch)
        if self.best["epoch"] == epoch:
            files.write_json(self.directory / "best.json", self.best)

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

    def _keeps_epoch(self, epoch: int) -> bool:
        policy, epochs = self.config.training.checkpoint_policy, self.config.training.checkpoint_epochs
        if policy == "interval":
            assert isinstance(epochs, int)
            return epoch % epochs == 0
        return policy == "explicit" and not isinstance(epochs, int) and epoch in epochs

    def _save_epoch(self, epoch: int) -> None:
        name = f"epoch-{epoch:03d}"
        facts = {
            "update": str(self.update),
            "tokens": str(self.tokens),
            "recipe": recipe_identity(self.config),
        }
        model, root = self.engine.model, self.directory.path
        if model.num_models > 1:
            for i in range(model.num_models):
                path = worker_directory(root, i) / f"{name}.safetensors"
                save_weights(path, model.local_state_dict(i), {**facts, "worker": str(i)})
        save_weights(root / f"{name}.safetensors", model.average_state_dict(), facts)
        if self.config.training.save_epoch_training_state:
            save_epoch_state(root / f"{name}.pt", self.state(), model.layout)

    def _stop_if_asked(self) -> None:
        if self.signals.received is not None:
            self._save_recovery()
            self.signals.check()

    def _save_recovery_if_due(self) -> None:
        minutes = self.config.training.recovery_minutes
        if minutes is None or time.monotonic() - self._last_saved < 60 * minutes:
            return
        try:
            self._save_recovery()
        except CheckpointError as error:
            self.progress.say(f"warning: {error}")  # the run itself can go on
        self._last_saved = time.monotonic()

    def _save_recovery(self) -> None:
        training = self.config.training
        if training.checkpoint_policy != "none" or training.recovery_minutes is not None:
            save_state(self.directory / "recovery.pt", self.state())

    def _finish(self) -> dict[str, Any]:
        """Keep the final weights, evaluate on the whole split, write the result and the picture."""
        if self.config.training.checkpoint_policy != "none":
            save_state(self.directory / "final.pt", self.state())
            (self.directory / "recovery.pt").unlink(missing_ok=True)
        evaluation = self.evaluator.full(self.engine.model.average_state_dict(), self.signals.check)
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
            "identity": {"recipe": recipe_identity(self.config), "data": self.cache.identity},
        }
        files.write_json(self.directory / "result.json", result)
        try:
            self._plot()
        except OSError as error:
            self.progress.say(f"warning: loss.png could not be drawn: {error}")
        return result

    def _plot(self) -> None:
        events = Counter(row["event"] for row in self.directory.rows())
        if events["train"]:
            title = f"{self.plan.parameters / 1e6:.1f}M parameters, {self.config.data.name}"
            plot_run(self.directory.rows(), self.directory / "loss.png", title)
