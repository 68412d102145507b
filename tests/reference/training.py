"""N separate models trained by hand in plain torch: the slow, obvious twin of `tiny_llm.training.engine`.

Every worker is a `ReferenceLlama` of its own with a `torch.optim.AdamW` of its own. Mixing multiplies the weights,
one long numpy vector a worker, by the matrix that the topology's definition gives. Learning rate and gamma are
written down again from their definitions. Only values are read from the config, never a formula.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiny_llm.config.schema import Config

sys.path.append(str(Path(__file__).parents[1] / "decentralized"))
from topology_reference import reference_matrix

from .llama import reference_llama


class HandTrainedWorkers:
    """N models and N optimizers; `update` is one synchronous step of all of them."""

    def __init__(self, config: Config, updates: int, initial: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.config, self.updates = config, updates
        workers = config.decentralized.num_models
        self.models = [reference_llama(config.model, initial, dtype) for _ in range(workers)]
        self.parameters = [list(model.parameters()) for model in self.models]
        self.optimizers = [adamw(parameters, config) for parameters in self.parameters]
        self.mixed = 0  # mixing steps so far
        self.clipped = 0  # gradients that were longer than the threshold
        self.weakest = 1.0  # the smallest gamma so far

    def update(self, r: int, tokens: Tensor, targets: Tensor) -> tuple[list[float], list[float]]:
        """Update r, zero-based, on a global batch; return local losses and norms before clipping."""
        workers, losses, norms = len(self.models), [], []
        for i, model in enumerate(self.models):
            self.optimizers[i].zero_grad()
            rows = range(i, len(tokens), workers)
            loss = model.loss(tokens[list(rows)], targets[list(rows)])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            norms.append(self._clip(self.parameters[i]))
        lr, scheme = learning_rate(self.config, r, self.updates), self.config.decentralized.scheme
        if scheme == "awc":
            self._mix(r)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if scheme == "atc":
            self._mix(r)
        return losses, norms

    def _clip(self, parameters: Sequence[Tensor]) -> float:
        threshold = self.config.optimizer.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(
            parameters, math.inf if threshold is None else threshold, foreach=False
        ).item()
        self.clipped += threshold is not None and norm > threshold
        return norm

    @torch.no_grad()
    def _mix(self, r: int) -> None:
        workers, every = len(self.models), self.config.decentralized.mix_every
        if workers == 1 or r % every != every - 1:
            return
        topology, strength = self.config.topology, gamma(self.config, r, self.updates)
        w = reference_matrix(topology.name, workers, self.mixed, topology.k, topology.seed)
        w = strength * w + (1 - strength) * np.eye(workers)
        vectors = [torch.nn.utils.parameters_to_vector(own).double().numpy() for own in self.parameters]
        for own, mixture in zip(self.parameters, w @ np.stack(vectors), strict=True):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(mixture).to(own[0].dtype), own)
        self.mixed += 1
        self.weakest = min(self.weakest, strength)


def adamw(parameters: Sequence[Tensor], config: Config) -> torch.optim.AdamW:
    """Plain AdamW in which matrices decay and norms do not."""
    optimizer = config.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, optimizer.lr, (optimizer.beta1, optimizer.beta2), optimizer.eps, foreach=False, fused=False
    )


def learning_rate(config: Config, r: int, total: int) -> float:
    """The rate of the zero-based update r of `total`."""
    lr, schedule, s = config.optimizer.lr, config.schedule, r + 1
    warmup = schedule.warmup_steps
    if s < warmup:
        return lr * s / warmup
    if schedule.name == "cosine":
        lowest = schedule.min_lr_ratio * lr
        return lowest + (lr - lowest) / 2 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup)))
    if schedule.name == "wsd":
        start = max(warmup, round(total * (1 - schedule.decay_fraction)))
        return lr if s <= start else lr * (1 - math.sqrt((s - start) / (total - start)))
    return lr


def gamma(config: Config, r: int, total: int) -> float:
    """How strongly the zero-based update r of `total` mixes."""
    adaptive = config.adaptive_consensus
    if not adaptive.enabled:
        return 1.0
    assert adaptive.p is not None
    start = math.ceil(Fraction(str(adaptive.start_frac)) * total)
    if r < start:
        return 1.0
    largest = max(learning_rate(config, active, total) for active in range(start, total))
    return float((learning_rate(config, r, total) / largest) ** adaptive.p)
