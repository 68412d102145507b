"""One update of all workers: local gradients, finite check, clip, mix and AdamW in the scheme's order.

Synchronous training is one worker that adds up micro-batches and mixes nothing; over several ranks they add up its
gradient (data parallel), or each holds its share of the workers (gossip). Executors and placements differ in how
workers share devices, never in the mathematics.
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
from tiny_llm.decentralized.arena import blocks
from tiny_llm.decentralized.mixing import Mixing
from tiny_llm.decentralized.packed_llama import PackedLlama, count_targets
from tiny_llm.decentralized.topology import make_topology
from tiny_llm.distributed.gossip import Exchange, all_reduce_bytes, bytes_sent
from tiny_llm.distributed.gradient_sum import GradientSum
from tiny_llm.distributed.ranks import Ranks, alone
from tiny_llm.distributed.replicas import check_replicas
from tiny_llm.models.decoder import decoder_block, loss_sums
from tiny_llm.models.dropout import dropout_keys
from tiny_llm.optim.adamw import PackedAdamW
from tiny_llm.training.device import compute_dtype, master_dtype

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 [rows, T]


class NonFiniteError(UserError):
    """A worker's loss or gradient is not finite; nothing was mixed or updated."""


@dataclass(frozen=True)
class UpdateResult:
    """Each worker's mean loss in nats and gradient norm before clipping, of all ranks."""

    losses: list[float]
    norms: list[float]


class Engine:
    """This rank's workers and how they advance. `update` is all that changes them."""

    def __init__(self, plan: Plan, device: torch.device, ranks: Ranks | None = None) -> None:
        config = plan.config
        self.plan = plan
        self.device = device
        self.ranks = ranks or alone(device)
        self.workers = plan.workers(self.ranks.rank)
        self.topology = make_topology(num_models=plan.num_models, **vars(config.topology))
        self.model = PackedLlama(config.model, len(self.workers), config.runtime.seed, master_dtype(config))
        self.model.to(device)
        self.optimizer = PackedAdamW(self.model, config.optimizer)
        self.dtype = compute_dtype(config)
        self.looped = executes_looped(config)
        self._in_place = self.looped and device.type == "cpu"
        self._gradient_sum = self._data_parallel() if plan.data_parallel else None
        self._loss_sums = compiled_loss(device) if config.runtime.compile else loss_sums

    def _data_parallel(self) -> GradientSum:
        model = self.model
        parameters = model.worker(0) if self.looped else model.packed()
        return GradientSum(self.ranks, model.layout, model.gradient_storage, parameters)

    def update(self, number: int, next_micro_batch: Callable[[], MicroBatch]) -> UpdateResult:
        """Advance every worker by the zero-based update `number`.

        next_micro_batch: gives tokens and targets [n * micro_batch_size, T] of this rank's n workers; called
        plan.accumulation times. Raises NonFiniteError on all ranks before anything is mixed or updated.
        """
        awc = self.plan.config.decentralized.scheme == "awc"
        exchange = self._exchange(number) if awc and self._mixes(number) else None
        losses = self._accumulate_gradients(number, next_micro_batch)
        norms = self.model.gradient_norms()
        result = self._checked(number, losses, norms)
        self.apply(number, norms, exchange)
        return result

    def apply(self, number: int, norms: Tensor, exchange: Exchange | None = None) -> None:
        """Clip by the workers' gradient norms [n], mix and update, in the scheme's order.

        exchange: what awc mixes with where it is under way already.
        """
        lr = self.plan.lr(number)
        if not self._mixes(number):
            self.optimizer.step(lr, norms)
        elif self.plan.config.decentralized.scheme == "awc":
            mixing = self._mixing(number, exchange or self._exchange(number))
            self.optimizer.step(lr, norms, before=mixing.apply_)
        elif self.ranks.world == 1:
            mixing = self._mixing(number, self._exchange(number))
            self.optimizer.step(lr, norms, after=mixing.apply_)
        else:  # what others send is known after all of their update
            self.optimizer.step(lr, norms)
            mixing = self._mixing(number, self._exchange(number))
            with torch.no_grad():
                for columns in blocks(self.model.parameter_storage):
                    mixing.apply_(columns)

    def arenas(self) -> dict[str, Tensor]:
        """Return the arenas that a training state is made of, by their names in it: this rank's rows."""
        return {
            "parameters": self.model.parameter_storage,
            "first_moment": self.optimizer.first_moment_storage,
            "second_moment": self.optimizer.second_moment_storage,
        }

    def collected(self) -> dict[str, Tensor] | None:
        """Return the arenas with the rows of all workers on the first rank, None on the others.

        Raises ReplicaError when data-parallel ranks do not hold the same bits.
        """
        if self.plan.data_parallel:
            check_replicas(self.ranks, self.arenas())
            return self.arenas() if self.ranks.first else None
        whole = {name: self.ranks.collected(arena) for name, arena in self.arenas().items()}
        return {name: arena for name, arena in whole.items() if arena is not None} or None

    @torch.no_grad()
    def average_weights(self) -> dict[str, Tensor]:
        """Return the mean of all ranks' workers, in fp32 at least, under the names of the single model."""
        if self.ranks.world == 1 or self.plan.data_parallel:
            return self.model.average_state_dict()
        rows = self.model.parameter_storage
        mean_D = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        self.ranks.sum_(mean_D)
        return self.model.layout.views(mean_D.div_(self.plan.num_models))

    def bytes_sent(self, number: int) -> float:
        """Predict the bytes of parameters or gradients that a rank sends in an update, mean over ranks."""
        row = self.model.parameter_storage[0]
        if self.plan.data_parallel:
            return all_reduce_bytes(self.ranks.world, row.nbytes)
        if not self._mixes(number):
            return 0.0
        return bytes_sent(self.topology.peers(self.plan.mixing_step(number)), len(self.workers), row.nbytes)

    def _mixes(self, number: int) -> bool:
        return self.plan.mixes(number) and self.plan.gamma(number) > 0

    def _exchange(self, number: int) -> Exchange:
        peers = self.topology.peers(self.plan.mixing_step(number))
        return Exchange(self.ranks, self.model.parameter_storage, peers)

    def _mixing(self, number: int, exchange: Exchange) -> Mixing:
        peers = self.topology.peers(self.plan.mixing_step(number))
        return Mixing(exchange.finish(), peers, self.plan.gamma(number))

    def _accumulate_gradients(self, number: int, next_micro_batch: Callable[[], MicroBatch]) -> Tensor:
        """Put each worker's mean gradient into the arena and return its mean loss, [n].

        Summed losses are differentiated and scaled once by the valid targets of the whole update, so padding
        that falls unevenly on micro-batches, or on data-parallel ranks, changes nothing. Of a data-parallel model
        the gradient is that of all ranks, the loss this rank's share.
        """
        self.model.zero_gradients_()
        batches = [self._deal(*next_micro_batch()) for _ in range(self.plan.accumulation)]
        valid_N = torch.stack([count_targets(targets) for _, targets in batches]).sum(0)
        if self._gradient_sum is not None:
            self.ranks.sum_(valid_N)
        valid_N.clamp_(min=1)
        losses_N = torch.zeros(len(self.workers), device=self.device, dtype=torch.float64)
        for index, (tokens_NBT, targets_NBT) in enumerate(batches):
            if self._gradient_sum is not None and index == len(batches) - 1:
                self._gradient_sum.begin()
            keys_N = self._dropout_keys(number, index)
            if self.looped:
                for i in range(len(self.workers)):
                    losses_N[i] += self._backward(
                        self.model.worker(i),
                        tokens_NBT[i],
                        targets_NBT[i],
                        valid_N[i],
                        None if keys_N is None else keys_N[i],
                    )
            else:
                losses_N += self._backward(self.model.packed(), tokens_NBT, targets_NBT, valid_N, keys_N)
        if self._gradient_sum is not None:
            self._gradient_sum.finish()
        return losses_N

    def _dropout_keys(self, number: int, micro_batch: int) -> Tensor | None:
        """Return this rank's workers' dropout keys of one micro-batch, [n, places, 2]; None without dropout."""
        config = self.plan.config
        if not config.model.dropout:
            return None
        if self.plan.data_parallel:
            micro_batch = micro_batch * self.ranks.world + self.ranks.rank
        keys = dropout_keys(config.model, config.runtime.seed, number, micro_batch, self.workers)
        return keys.to(self.device)

    def _backward(
        self,
        parameters: dict[str, Tensor],
        tokens: Tensor,
        targets: Tensor,
        valid: Tensor,
        keys: Tensor | None,
    ) -> Tensor:
        means = self._loss_sums(
            self.plan.config.model,
            parameters,
            tokens,
            targets,
            self.dtype,
            keys,
            divisor=valid,
            in_place=self._in_place,
        )
        torch.autograd.backward(means.sum())
        return means.detach()

    def _deal(self, tokens: Tensor, targets: Tensor) -> MicroBatch:
        """Deal rows out: worker i gets rows i, i + n, i + 2n, ... as [n, B, T]."""
        workers = len(self.workers)
        return (
            tokens.view(-1, workers, tokens.shape[-1]).transpose(0, 1).contiguous(),
            targets.view(-1, workers, targets.shape[-1]).transpose(0, 1).contiguous(),
        )

    def _checked(self, number: int, losses: Tensor, norms: Tensor) -> UpdateResult:
        """Return what all ranks found. Raises NonFiniteError for the first worker that is not finite."""
        found_WM = self.ranks.gathered(torch.cat([losses, norms.to(losses)]))
        all_losses, all_norms = (part.flatten() for part in found_WM.chunk(2, dim=1))
        if self.plan.data_parallel:
            all_losses, all_norms = all_losses.sum(0, keepdim=True), all_norms[:1]
        result = UpdateResult(all_losses.tolist(), all_norms.tolist())
        for worker, (loss, norm) in enumerate(zip(result.losses, result.norms, strict=True)):
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise NonFiniteError(
                    f"update {number + 1}: loss {loss:g} and gradient norm {norm:g}"
                    + (f" in worker {worker}" if self.plan.num_models > 1 else "")
                    + "; nothing was mixed or updated. Lower optimizer.lr, or resume from an earlier checkpoint"
                )
        return result


def compiled_loss(device: torch.device) -> Callable[..., Tensor]:
    """Return `loss_sums` compiled: as a whole for GPUs; on CPUs one block, which then serves every layer."""
    if device.type == "cpu":
        return functools.partial(loss_sums, block=torch.compile(decoder_block, dynamic=False))
    return torch.compile(loss_sums, dynamic=False)
