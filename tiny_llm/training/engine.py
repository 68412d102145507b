"""One update of all workers: local gradients, finite check, clip, mix and AdamW in the scheme's order.

Synchronous training is one worker that adds up micro-batches and mixes nothing. The executors differ in how
workers share the device, never in the mathematics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_llm.config.errors import UserError
from tiny_llm.config.memory import executes_looped
from tiny_llm.config.plan import Plan
from tiny_llm.decentralized.packed_llama import PackedLlama, count_targets
from tiny_llm.decentralized.topology import make_topology
from tiny_llm.models.decoder import decoder_block, loss_sums
from tiny_llm.models.dropout import dropout_keys
from tiny_llm.optim.adamw import PackedAdamW
from tiny_llm.training.device import compute_dtype, master_dtype

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 [rows, T]


class NonFiniteError(UserError):
    """A worker's loss or gradient is not finite; nothing was mixed or updated."""


@dataclass(frozen=True)
class UpdateResult:
    """Each worker's mean loss in nats and gradient norm before clipping."""

    losses: list[float]
    norms: list[float]


class Engine:
    """The workers and how they advance. `update` is all that changes them."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        config = plan.config
        self.plan = plan
        self.device = device
        self.topology = make_topology(num_models=plan.num_models, **vars(config.topology))
        self.model = PackedLlama(config.model, plan.num_models, config.runtime.seed, master_dtype(config))
        self.model.to(device)
        self.optimizer = PackedAdamW(self.model, config.optimizer)
        self.dtype = compute_dtype(config)
        self.looped = executes_looped(config)
        self._loss_sums = compiled_loss(device) if config.runtime.compile else loss_sums

    def update(self, number: int, next_micro_batch: Callable[[], MicroBatch]) -> UpdateResult:
        """Advance every worker by the zero-based update `number`.

        next_micro_batch: gives tokens and targets [N * micro_batch_size, T]; called plan.accumulation times.
        Raises NonFiniteError before anything is mixed or updated.
        """
        losses = self._accumulate_gradients(number, next_micro_batch)
        norms = self.model.gradient_norms()
        result = self._checked(number, losses, norms)
        self.apply(number, norms)
        return result

    def apply(self, number: int, norms: Tensor) -> None:
        """Clip by the workers' gradient norms [N], mix and update, in the scheme's order."""
        scheme = self.plan.config.decentralized.scheme
        if scheme == "awc":
            self._mix(number)
        self.optimizer.step(self.plan.lr(number), norms)
        if scheme == "atc":
            self._mix(number)

    def _accumulate_gradients(self, number: int, next_micro_batch: Callable[[], MicroBatch]) -> Tensor:
        """Put each worker's mean gradient into the arena and return its mean loss, [N].

        Summed losses are differentiated and scaled once by the valid targets of the whole update, so padding
        that falls unevenly on micro-batches changes nothing.
        """
        self.model.zero_gradients_()
        batches = [self._deal(*next_micro_batch()) for _ in range(self.plan.accumulation)]
        valid_N = torch.stack([count_targets(targets) for _, targets in batches]).sum(0).clamp_min(1)
        losses_N = torch.zeros(self.plan.num_models, device=self.device, dtype=torch.float64)
        for index, (tokens_NBT, targets_NBT) in enumerate(batches):
            keys_N = self._dropout_keys(number, index)
            if self.looped:
                for i in range(self.plan.num_models):
                    losses_N[i] += self._backward(
                        self.model.worker(i),
                        tokens_NBT[i],
                        targets_NBT[i],
                        valid_N[i],
                        None if keys_N is None else keys_N[i],
                    )
            else:
                losses_N += self._backward(self.model.packed(), tokens_NBT, targets_NBT, valid_N, keys_N)
        return losses_N

    def _dropout_keys(self, number: int, micro_batch: int) -> Tensor | None:
        """Return every worker's dropout keys of one micro-batch, [N, places, 2]; None without dropout."""
        config = self.plan.config
        if not config.model.dropout:
            return None
        workers = range(self.plan.num_models)
        keys = dropout_keys(config.model, config.runtime.seed, number, micro_batch, workers)
        return keys.to(self.device)

    def _backward(
        self,
        parameters: dict[str, Tensor],
        tokens: Tensor,
        targets: Tensor,
        valid: Tensor,
        keys: Tensor | None,
    ) -> Tensor:
        sums = self._loss_sums(self.plan.config.model, parameters, tokens, targets, self.dtype, keys)
        means = sums / valid
        torch.autograd.backward(means.sum())
        return means.detach()

    def _deal(self, tokens: Tensor, targets: Tensor) -> MicroBatch:
        """Deal rows out: worker i gets rows i, i + N, i + 2N, ... as [N, B, T]."""
        workers = self.plan.num_models
        return (
            tokens.view(-1, workers, tokens.shape[-1]).transpose(0, 1).contiguous(),
            targets.view(-1, workers, targets.shape[-1]).transpose(0, 1).contiguous(),
        )

    def _checked(self, number: int, losses: Tensor, norms: Tensor) -> UpdateResult:
        result = UpdateResult(losses.tolist(), norms.tolist())
        for worker, (loss, norm) in enumerate(zip(result.losses, result.norms, strict=True)):
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise NonFiniteError(
                    f"update {number + 1}: loss {loss:g} and gradient norm {norm:g}"
                    + (f" in worker {worker}" if self.plan.num_models > 1 else "")
                    + "; nothing was mixed or updated. Lower optimizer.lr, or resume from an earlier checkpoint"
                )
        return result

    def _mix(self, number: int) -> None:
        if self.plan.mixes(number):
            self.model.mix_(self.topology, self.plan.mixing_step(number), self.plan.gamma(number))


def compiled_loss(device: torch.device) -> Callable[..., Tensor]:
    """Return `loss_sums` compiled: as a whole for GPUs; on CPUs one block, which then serves every layer."""
    if device.type == "cpu":
        return functools.partial(loss_sums, block=torch.compile(decoder_block, dynamic=False))
    return torch.compile(loss_sums, dynamic=False)
