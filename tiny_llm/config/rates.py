"""Learning rate and mixing strength as functions of the update; nothing else computes either.

`updates_done` s counts from 1: the update with zero-based number r uses s = r + 1.
"""

from __future__ import annotations

import math
from fractions import Fraction

from tiny_llm.config.schema import AdaptiveConsensusConfig, CosineSchedule, Schedule, WsdSchedule


def exact(value: float) -> Fraction:
    """Return the rational number that a float was written as: 0.1 is one tenth."""
    return Fraction(repr(value))


def round_half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def lr_factor(schedule: Schedule, updates_done: int, total: int) -> float:
    """Return the learning rate after `updates_done` of `total` updates, as a multiple of optimizer.lr.

    cosine: Loshchilov & Hutter 2017, eq. 5, from the end of warm-up to min_lr_ratio at the last update.
    wsd: constant, then 1 - sqrt(progress) over the last decay_fraction (Haegele et al. 2024, eq. 1).
    """
    warmup = schedule.warmup_steps
    if updates_done < warmup:
        return updates_done / warmup
    if isinstance(schedule, CosineSchedule):
        progress = (updates_done - warmup) / max(1, total - warmup)
        return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    if isinstance(schedule, WsdSchedule):
        start = max(warmup, total - round_half_up(exact(schedule.decay_fraction) * total))
        progress = (updates_done - start) / max(1, total - start)
        return 1 - math.sqrt(max(0.0, progress))
    return 1.0


def first_adaptive_update(adaptive: AdaptiveConsensusConfig, total: int) -> int:
    """Return the zero-based update from which gamma follows the learning rate; `total` when never."""
    if not adaptive.enabled or adaptive.start_frac is None:
        return total
    return math.ceil(exact(adaptive.start_frac) * total)


def mixing_gamma(adaptive: AdaptiveConsensusConfig, factor: float, largest_factor: float) -> float:
    """Return gamma = (lr / largest lr of the active window) ** p for an update inside that window."""
    if not adaptive.p:
        return 1.0
    return float((factor / largest_factor) ** adaptive.p)
