"""How much better one configuration is than another: differences over the seeds that both have.

Two runs with one seed start from the same weights and read the same sequences, so much of their luck is shared
and drops out of the difference; the interval is that of a mean of differences (Student 1908, The probable error
of a mean).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tiny_llm.analysis.groups import Group, statistic
from tiny_llm.analysis.runs import LOSS


@dataclass(frozen=True)
class Difference:
    """Mean of (one - other) in final loss, in nats, its sample SD and 95 % interval; negative: one is better.

    seeds: those that both have. Without any, the means themselves are subtracted and there is no interval;
    over a single seed there is none either.
    """

    one: int
    other: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    seeds: tuple[Any, ...]


def difference(one: Group, other: Group) -> Difference:
    """Return the difference in final loss, paired by seed where both groups have a seed."""
    losses = {run.seed: run.metrics[LOSS] for run in other.runs}
    pairs = {run.seed: run.metrics[LOSS] - losses[run.seed] for run in one.runs if run.seed in losses}
    if not pairs:
        mean = one.statistics[LOSS].mean - other.statistics[LOSS].mean
        return Difference(one.number, other.number, mean, None, None, None, ())
    paired = statistic(pairs.values())
    low = high = None
    if paired.sd is not None:
        reach = student_t_quantile(0.975, paired.n - 1) * paired.sd / math.sqrt(paired.n)
        low, high = paired.mean - reach, paired.mean + reach
    return Difference(one.number, other.number, paired.mean, paired.sd, low, high, tuple(pairs))


def student_t_quantile(probability: float, degrees: int) -> float:
    """Return t with P(T <= t) = probability, for probability in (0, 1) and degrees of freedom >= 1.

    t = sqrt(degrees) tan(angle): the angle is found by halving, down to neighbouring floats.
    """
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if (1 + _central_probability(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """Return P(|T| <= sqrt(degrees) tan(angle)); Abramowitz and Stegun, equations 26.7.3 and 26.7.4."""
    cos = math.cos(angle)
    first = degrees % 2  # the sum runs over the powers of cos of the other parity than `degrees`
    term, total = cos if first else 1.0, 0.0
    for power in range(first, degrees - 1, 2):
        total += term
        term *= cos * cos * (power + 1) / (power + 2)
    if first:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
