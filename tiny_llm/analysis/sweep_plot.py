"""report.png: loss against tokens, one colour a configuration, and final loss against each swept key.

Above, the mean validation loss of each group's seeds with a band of one sample SD, whole and its later part
closer; the number at a curve's end is the group's rank, which the list beside it explains. Below, a panel a
swept key (key_panels.py). Nothing global of matplotlib is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiny_llm import files
from tiny_llm.analysis.curves import FAINT, INK, Numbers, dress, name_axis, tokens_tick
from tiny_llm.analysis.groups import Group, Report
from tiny_llm.analysis.key_panels import draw_key, is_crowded, nearest_groups
from tiny_llm.analysis.keys import label_of, value_of
from tiny_llm.analysis.runs import LOSS

Curve = tuple[Numbers, Numbers, Numbers]  # tokens, mean, sample SD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a3e9d", "#555555")
MOST_LISTED = 30
MOST_LIGHT = 0.55  # luminance of a colour
FEW_POINTS = 15  # of a curve: each is marked
CLOSER_FROM = 0.5  # of all tokens: where the closer panel begins

# Inches. Three columns: the whole curves, the same closer, the list; the swept keys stand in the same columns.
LEFT, PANEL, GAP, RIGHT = 0.6, 3.75, 0.7, 0.2
CURVES, KEY, BETWEEN, TITLE, FOOT = 3.6, 2.0, 0.95, 0.75, 0.6
SLANTED = 0.35  # more below a panel whose values are written aslant
LEAST_LISTED, LINE, LETTER = 2.8, 0.185, 0.068  # the list: its width, a line's height, a letter's width
NUMBER = 0.14  # the height of a curve's number


def plot_report(report: Report, out: Path) -> None:
    """Draw the report into the PNG `out`, whole or not at all."""
    figure = draw_report(report)
    files.write_whole(out, lambda file: figure.savefig(file, format="png"))


def draw_report(report: Report) -> Figure:
    """Return the figure: curves, their list, and the swept keys below (a single one under a short list)."""
    keys = report.swept_keys()
    entries = _list_entries(report, keys)
    listed = max(LEAST_LISTED, LETTER * max((len(label) for _, label in entries), default=0) + 0.75)
    curves = max(CURVES, LINE * len(entries))
    beside = len(keys) == 1 and LINE * len(entries) <= curves - KEY - BETWEEN / 2
    rows = 0 if beside else math.ceil(len(keys) / 3)
    middle, right = LEFT + PANEL + GAP, LEFT + 2 * (PANEL + GAP)
    between = BETWEEN + (SLANTED if any(is_crowded(report, key) for key in keys) else 0)
    sheet = Sheet(right + listed + RIGHT, TITLE + curves + FOOT + rows * (KEY + between), _title(report))
    colors = group_colors(len(report.groups))
    whole, closer = sheet.panel(LEFT, TITLE, PANEL, curves), sheet.panel(middle, TITLE, PANEL, curves)
    _draw_curves(whole, closer, report, colors)
    _draw_list(sheet.panel(right, TITLE, listed, curves), entries, colors, listed, curves)
    if beside:
        draw_key(sheet.panel(right, TITLE + curves - KEY, listed, KEY), report, keys[0], colors)
        return sheet.figure
    wide = (sheet.width - LEFT - RIGHT + GAP) / min(3, max(1, len(keys)))
    for place, key in enumerate(keys):
        row, column = divmod(place, 3)
        top = TITLE + curves + BETWEEN + row * (KEY + between)
        draw_key(sheet.panel(LEFT + column * wide, top, wide - GAP, KEY), report, key, colors)
    return sheet.figure


class Sheet:
    """A figure on which panels are placed in inches from its upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
        FigureCanvasAgg(self.figure)
        self.figure.text(LEFT / width, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", color=INK)

    def panel(self, left: float, top: float, wide: float, tall: float) -> Axes:
        bottom = self.height - top - tall
        place = (left / self.width, bottom / self.height, wide / self.width, tall / self.height)
        return self.figure.add_axes(place)


def group_colors(count: int) -> list[str]:
    """Return a colour a group: few are easily told apart, many run through the rainbow from the best on."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count <= len(FEW_COLORS):
        return list(FEW_COLORS[:count])
    colors = []
    for place in range(count):
        red, green, blue, _ = colormaps["turbo"](0.04 + 0.92 * place / (count - 1))
        # Its middle is too light for white paper: luminance is held down.
        less = min(1.0, MOST_LIGHT / (0.3 * red + 0.59 * green + 0.11 * blue))
        colors.append(to_hex((red * less, green * less, blue * less)))
    return colors


def mean_curve(group: Group) -> Curve:
    """Return tokens, mean and sample SD of the validation loss, where every seed has one; SD 0 for one seed."""
    curves = [run.curve for run in group.runs]
    tokens = sorted(set(curves[0]).intersection(*curves[1:]))
    losses = np.array([[curve[at] for at in tokens] for curve in curves], dtype=np.float64)
    sd = losses.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(tokens))
    return np.array(tokens, dtype=np.float64), losses.mean(axis=0), sd


def _title(report: Report) -> str:
    counts = [len(group.runs) for group in report.groups]
    if not counts:
        return "no complete run yet"
    equal = counts[0] > 1 and min(counts) == max(counts)
    runs = f"{counts[0]} seeds each" if equal else f"{sum(counts)} run" + "s" * (sum(counts) > 1)
    title = f"{len(counts)} configuration{'s' * (len(counts) > 1)}, {runs}"
    sizes = {run.parameters for group in report.groups for run in group.runs}
    if len(sizes) == 1 and (size := sizes.pop()):
        title += f", {size / 1e6:.3g}M parameters"
    return title + (f", {value_of(report.shared, 'data.name')}" if "data.name" in report.shared else "")


def _draw_curves(whole: Axes, closer: Axes, report: Report, colors: Sequence[str]) -> None:
    """Draw the groups' curves twice; while there is no group, the unfinished runs' as thin grey lines."""
    unfinished = [] if report.groups else [run.curve for run in report.left_out if run.curve]
    curves = [mean_curve(group) for group in report.groups]
    ends = [(tokens[-1], mean[-1], place) for place, (tokens, mean, _) in enumerate(curves) if tokens.size]
    last = float(max([*(max(curve) for curve in unfinished), *(tokens for tokens, _, _ in ends)], default=1))
    alpha = min(0.18, 2 / max(1, len(curves)))
    for axis, start, name in (
        (whole, 0.0, "validation loss (nats)"),
        (closer, CLOSER_FROM, "the later part, closer"),
    ):
        dress(axis)
        name_axis(axis, name)
        _scale_tokens(axis, start * last, last)
        for lone in unfinished:
            axis.plot(list(lone), list(lone.values()), color=FAINT, linewidth=0.8)
        for place, (tokens, mean, sd) in enumerate(curves):
            axis.fill_between(tokens, mean - sd, mean + sd, color=colors[place], alpha=alpha, linewidth=0)
            marker = "o" if tokens.size <= FEW_POINTS else None
            best_on_top = 3 - place / 1000
            axis.plot(tokens, mean, color=colors[place], lw=1.3, marker=marker, ms=3, zorder=best_on_top)
    _scale_losses(closer, curves[: len(nearest_groups(report))], CLOSER_FROM * last)
    _number_ends(closer, [(loss, place) for _, loss, place in ends], colors)


def _scale_losses(axis: Axes, curves: Sequence[Curve], start: float) -> None:
    """Let the axis hold what the curves and bands are from `start` on."""
    parts = [(mean[tokens >= start], sd[tokens >= start]) for tokens, mean, sd in curves]
    heights = np.concatenate(
        [np.empty(0), *(mean - sd for mean, sd in parts), *(mean + sd for mean, sd in parts)]
    )
    if heights.size and (margin := 0.06 * float(np.ptp(heights))):
        axis.set_ylim(heights.min() - margin, heights.max() + margin)


def _scale_tokens(axis: Axes, start: float, end: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_xlim(start, start + (end - start) * 1.03)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_tick(value)))
    axis.set_xlabel("tokens", fontsize=9, color=INK)


def _number_ends(axis: Axes, ends: Sequence[tuple[float, int]], colors: Sequence[str]) -> None:
    """Write the number of each listed curve beside its end, moved apart where two would overlap."""
    low, high = axis.get_ylim()
    ends = sorted(end for end in ends if end[1] < MOST_LISTED)
    gap = NUMBER / (axis.bbox.height / axis.figure.dpi)
    heights = spread_apart([(loss - low) / (high - low) for loss, _ in ends], gap)
    for height, (_, place) in zip(heights, ends, strict=True):
        text = axis.text(1.015, height, str(place + 1), transform=axis.transAxes, va="center")
        text.set(color=colors[place], fontsize=8.5, fontweight="bold")


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return ascending heights, at least `gap` apart, near where they were and below 1 where there is room."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    ceiling = max(1.0, gap * (len(moved) - 1))
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], ceiling)
        ceiling = moved[place] - gap
    return moved


def _list_entries(report: Report, keys: Sequence[str]) -> list[tuple[str, str]]:
    """Return (loss, label) of each group that is listed."""
    entries = [
        (f"{group.statistics[LOSS].mean:.3f}", label_of(group.settings, keys)) for group in report.groups
    ]
    if len(entries) > MOST_LISTED:
        return [*entries[:MOST_LISTED], ("", f"and {len(entries) - MOST_LISTED} more, in report.csv")]
    return entries


def _draw_list(
    axis: Axes, entries: Sequence[tuple[str, str]], colors: Sequence[str], wide: float, tall: float
) -> None:
    """The groups by rank: number, mean final loss, label. `wide`, `tall`: the panel's inches."""
    axis.set_axis_off()
    name_axis(axis, "final loss, the best first" if entries else "no complete run yet")
    for place, ((loss, label), color) in enumerate(zip(entries, [*colors, FAINT], strict=False)):
        height = 1 - (place + 0.6) * LINE / tall
        for inches, words in ((0.0, str(place + 1) if loss else ""), (0.27, loss), (0.72, label)):
            text = axis.text(inches / wide, height, words, transform=axis.transAxes, va="center")
            text.set(color=INK if inches else color, fontsize=8.5, fontweight="normal" if inches else "bold")
