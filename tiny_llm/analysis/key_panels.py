"""The lower panels of report.png: final loss against one swept key.

A point is a group (mean, bar of one sample SD) in its colour, small points are its seeds. Thin lines join groups
that differ in this key alone, so a line's slope is the key's effect with the rest held fixed. Values stand at
equal distances; groups of one value stand side by side.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiny_llm.analysis.curves import FAINT, dress, name_axis
from tiny_llm.analysis.groups import Group, Report
from tiny_llm.analysis.keys import MISSING, identity, short_name, value_of
from tiny_llm.analysis.runs import LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPREAD = 0.5  # how much of a value's place its groups may take
CROWDED = 34  # letters that the values' names may have before they are slanted
FAR, NEAR = 10.0, 0.5  # farther from the best than 10 times the median is, and than 0.5 nats: off the panel


def draw_key(axis: Axes, report: Report, key: str, colors: Sequence[str]) -> None:
    """Draw the final loss of every group against its value of `key`."""
    dress(axis)
    axis.grid(False, axis="x")
    name_axis(axis, f"final loss against {key}")
    following = report.followers(key)
    if following:
        text = f"and with it {', '.join(short_name(other) for other in following)}"
        axis.set_xlabel(text, fontsize=8, color=FAINT)
    values = _ordered_values(report, key)
    families = _families(report, {key, *following})
    for place, family in enumerate(families):
        shift = (place - (len(families) - 1) / 2) * SPREAD / max(len(families), 4)
        places = [(values.index(value_of(group.settings, key)) + shift, group) for group in family]
        _draw_family(axis, sorted(places, key=lambda one: one[0]), colors)
    slant, side = (20, "right") if is_crowded(report, key) else (0, "center")
    axis.set_xticks(range(len(values)), values, rotation=slant, ha=side)
    axis.set_xlim(-0.5, len(values) - 0.5)
    _end_above_the_nearest(axis, report)


def is_crowded(report: Report, key: str) -> bool:
    """Whether the names of a key's values must be slanted to fit."""
    return len("".join(_ordered_values(report, key))) > CROWDED


def _draw_family(axis: Axes, places: Sequence[tuple[float, Group]], colors: Sequence[str]) -> None:
    means = [group.statistics[LOSS].mean for _, group in places]
    axis.plot([x for x, _ in places], means, color="#c4c4c4", linewidth=0.9, zorder=1)
    for x, group in places:
        color, loss = colors[group.number - 1], group.statistics[LOSS]
        seeds = [run.metrics[LOSS] for run in group.runs]
        axis.plot([x] * len(seeds), seeds, ".", color=color, markersize=3.5, alpha=0.5, zorder=2)
        axis.errorbar(x, loss.mean, loss.sd or 0, color=color, marker="o", markersize=5, capsize=2, zorder=3)


def nearest_groups(report: Report) -> list[Group]:
    """Return the groups without those that are far above most: diverged, they would press all others flat."""
    losses = [group.statistics[LOSS].mean for group in report.groups] or [0.0]
    top = losses[0] + max(FAR * (statistics.median(losses) - losses[0]), NEAR)
    return [group for group, loss in zip(report.groups, losses, strict=False) if loss <= top]


def _end_above_the_nearest(axis: Axes, report: Report) -> None:
    near = nearest_groups(report)
    if len(near) == len(report.groups):
        return
    losses = [run.metrics[LOSS] for group in near for run in group.runs]
    margin = 0.1 * (max(losses) - min(losses))
    axis.set_ylim(min(losses) - margin, max(losses) + margin)
    above = ", ".join(str(group.number) for group in report.groups[len(near) :])
    axis.set_title(f"above: {above}", loc="right", fontsize=8, color=FAINT, pad=4)


def _ordered_values(report: Report, key: str) -> list[str]:
    """Return the values, numbers by size and words by the best group that has them; no value comes first."""
    values = list(dict.fromkeys(value_of(group.settings, key) for group in report.groups))
    numbers = {value: number for value in values if (number := _number(value)) is not None}
    if set(values) - set(numbers) <= {MISSING, "null"}:
        values.sort(key=lambda value: numbers.get(value, 0.0))
    return sorted(values, key=lambda value: value not in (MISSING, "null"))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _families(report: Report, free: set[str]) -> list[list[Group]]:
    """Return the groups that differ in the keys of `free` alone, in the order of their best."""
    families: dict[str, list[Group]] = {}
    for group in report.groups:
        rest = [key for key in report.keys if key not in free]
        families.setdefault(identity(group.settings, rest), []).append(group)
    return list(families.values())
