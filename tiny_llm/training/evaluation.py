"""Validation loss: token-weighted mean cross-entropy, in nats, of one ordinary model.

Several ranks share the work: they take turns at the batches and add up what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiny_llm.config.schema import Config
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.validation import validation_blocks
from tiny_llm.distributed.ranks import Ranks, alone
from tiny_llm.models.decoder import loss_sums
from tiny_llm.models.operations import IGNORED
from tiny_llm.training.device import compute_dtype


@dataclass(frozen=True)
class Evaluation:
    """A mean loss in nats over `targets` targets."""

    loss: float
    targets: int


class Evaluator:
    """Evaluates weights on a validation split; the subset for epochs is read once and kept in memory."""

    def __init__(
        self, config: Config, cache: TokenCache, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self.cache = cache
        self.device = device
        self.ranks = ranks or alone(device)
        self._subset: tuple[NDArray[np.uint16], NDArray[np.int64]] | None = None

    def subset(self, weights: Mapping[str, Tensor], between: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate on the fixed subset. `between` is called between batches, on all ranks, and may raise to stop."""
        if self._subset is None:
            evaluation, length = self.config.evaluation, self.config.model.context_length
            self._subset = validation_blocks(self.cache, length, evaluation.subset_blocks, evaluation.seed)
        return self._evaluate(weights, *self._subset, between)

    def full(self, weights: Mapping[str, Tensor], between: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate on the whole split, the partial last block included."""
        length = self.config.model.context_length
        return self._evaluate(weights, *validation_blocks(self.cache, length, None, 0), between)

    @torch.no_grad()
    def _evaluate(
        self,
        weights: Mapping[str, Tensor],
        blocks: NDArray[np.uint16],
        valid: NDArray[np.int64],
        between: Callable[[], None],
    ) -> Evaluation:
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        size, ranks = self.config.evaluation.batch_size, self.ranks
        for first in range(0, len(blocks), size * ranks.world):
            between()
            own = slice(first + size * ranks.rank, first + size * (ranks.rank + 1))
            if len(blocks[own]):
                total += self._loss_sum(weights, blocks[own], valid[own])
        ranks.sum_(total)
        count = int(valid.sum())
        return Evaluation(float(total) / max(1, count), count)

    def _loss_sum(
        self, weights: Mapping[str, Tensor], blocks: NDArray[np.uint16], valid: NDArray[np.int64]
    ) -> Tensor:
        """Return the summed loss of one batch of blocks [B, L + 1] with valid [B] targets each."""
        rows = torch.from_numpy(blocks.astype(np.int64))
        counted = torch.arange(rows.shape[1] - 1) < torch.from_numpy(valid.astype(np.int64))[:, None]
        targets = rows[:, 1:].masked_fill(~counted, IGNORED).to(self.device)
        tokens = rows[:, :-1].contiguous().to(self.device)
        return loss_sums(self.config.model, weights, tokens, targets, compute_dtype(self.config))
