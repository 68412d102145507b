"""Runs that differ in their seed alone, brought together: means, sample SDs and a ranking.

In go `RunRecord`s, out comes a `Report`: ranked `Group`s of complete runs, the runs that are left out, and the
keys that tell the groups apart. Two runs belong together when every leaf of their configs is equal but
runtime.seed and what cannot change a number (config/saved.py's NOT_THE_RECIPE).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tiny_llm.analysis.keys import Settings, followers, identity, swept_keys, varying_keys
from tiny_llm.analysis.runs import LOSS, METRICS, SPEED, RunRecord


@dataclass(frozen=True)
class Statistic:
    """`n` values: their mean, sample SD (ddof=1; None for a single value) and the best of them."""

    mean: float
    sd: float | None
    n: int
    best: float


@dataclass(frozen=True)
class Group:
    """A configuration with its complete runs in the order of their seeds; `number` is its rank, from 1."""

    number: int
    settings: Settings
    runs: tuple[RunRecord, ...]
    statistics: Mapping[str, Statistic]

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True)
class Report:
    """What the directories say together.

    groups: by mean final loss, the lowest first. left_out: runs that are in no mean. keys: what varies over all
    runs. shared: the settings that do not vary. notes: what a reader of the means should know.
    """

    groups: tuple[Group, ...]
    left_out: tuple[RunRecord, ...]
    keys: tuple[str, ...]
    shared: Settings
    notes: tuple[str, ...]

    @property
    def configurations(self) -> list[Settings]:
        return [group.settings for group in self.groups]

    def swept_keys(self) -> list[str]:
        """Return the keys that vary among the groups, without those that follow from another."""
        varying = [
            key for key in self.keys if len({identity(one, (key,)) for one in self.configurations}) > 1
        ]
        return swept_keys(self.configurations, varying)

    def followers(self, key: str) -> list[str]:
        """Return the keys that vary, but whose value follows from that of `key` in every group."""
        return followers(self.configurations, self.keys, key)


def make_report(runs: Sequence[RunRecord]) -> Report:
    """Group, average and rank the runs."""
    together: dict[str, list[RunRecord]] = {}
    left_out = []
    for run in _without_repeated_seeds(runs):
        if run.status == "complete":
            together.setdefault(identity(run.settings), []).append(run)
        else:
            left_out.append(run)
    groups = _rank(together.values())
    configurations = [run.settings for run in runs if run.settings]
    keys = varying_keys(configurations)
    shared = {key: value for one in configurations for key, value in one.items() if key not in keys}
    return Report(groups, tuple(left_out), keys, shared, tuple(_notes(groups)))


def statistic(values: Iterable[float], highest_is_best: bool = False) -> Statistic:
    """Return mean, sample SD, count and best. Sorted first, so equal values give bitwise equal means."""
    numbers = np.array(sorted(values), dtype=np.float64)
    sd = float(np.std(numbers, ddof=1)) if numbers.size > 1 else None
    best = numbers[-1] if highest_is_best else numbers[0]
    return Statistic(float(np.mean(numbers)), sd, int(numbers.size), float(best))


def _without_repeated_seeds(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Mark the later of two complete runs of one configuration and seed: it would count the seed twice."""
    first: dict[tuple[str, Any], RunRecord] = {}
    marked = []
    for run in runs:
        if run.status == "complete":
            counted = first.setdefault((identity(run.settings), run.seed), run)
            if counted is not run:
                reason = f"seed {run.seed} of this configuration is counted from {counted.directory}"
                run = replace(run, status="repeated", reason=reason)
        marked.append(run)
    return marked


def _rank(together: Iterable[Sequence[RunRecord]]) -> tuple[Group, ...]:
    groups = []
    for runs in together:
        in_order = tuple(sorted(runs, key=lambda run: (run.seed is None, run.seed)))
        statistics = {
            name: statistic(values, highest_is_best=name == SPEED)
            for name in METRICS
            if (values := [run.metrics[name] for run in in_order if name in run.metrics])
        }
        groups.append(Group(0, in_order[0].settings, in_order, statistics))
    groups.sort(key=_place)
    return tuple(replace(group, number=number) for number, group in enumerate(groups, 1))


def _place(group: Group) -> tuple[float, float, float, float, str]:
    """Return what ranks a group: mean loss, then the lower lr, beta1 and beta2, then its settings."""
    lr, beta1, beta2 = (
        group.settings.get(f"optimizer.{name}", math.inf) for name in ("lr", "beta1", "beta2")
    )
    return group.statistics[LOSS].mean, lr, beta1, beta2, identity(group.settings)


def _notes(groups: Sequence[Group]) -> list[str]:
    notes = []
    for group in groups:
        caches = sorted({run.data[:12] for run in group.runs if run.data})
        if len(caches) > 1:
            notes.append(f"group {group.number} averages runs on different token caches: {', '.join(caches)}")
    return notes
