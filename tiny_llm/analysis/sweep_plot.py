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
from tiny_llm.analysis.curves import FAINT, INK, Numbers, _dress, _name, tokens_tick
from tiny_llm.analysis.groups import Group, Report
from tiny_llm.analysis.key_panels import draw_key
from tiny_llm.analysis.keys import label_of, value_of
from tiny_llm.analysis.runs import LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a3e9d", "#555555")
MOST_LISTED = 30
MOST_LIGHT = 0.55
CLOSER_FROM = 0.4  # of all tokens: where the closer panel begins

# Inches. Three columns: the whole curves, the same closer, the list; the swept keys stand in the same columns.
LEFT, PANEL, GAP, RIGHT = 0.6, 3.75, 0.62, 0.2
CURVES, KEY, BETWEEN, TITLE, FOOT = 3.3, 2.0, 0.95, 0.75, 0.6
LINE, LETTER = 0.185, 0.068  # of the list: a line's height, a letter's width


def plot_report(report: Report, out: Path) -> None:
    """Draw the report into the PNG `out`, whole or not at all."""
    figure = draw_report(report)
    files.write_whole(out, lambda file: figure.savefig(file, format="png"))


def draw_report(report: Report) -> Figure:
    """Return the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = report.swept_keys()
    entries = _list_entries(report, keys)
    listed = max(2.6, LETTER * max((len(label) for _, label in entries), default=0) + 0.75)
    curves = max(CURVES, LINE * len(entries))
    rows = math.ceil(len(keys) / 3)
    width = LEFT + 2 * (PANEL + GAP) + listed + RIGHT
    height = TITLE + curves + FOOT + rows * (KEY + BETWEEN)
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(LEFT / width, 1 - 0.3 / height, _title(report), fontsize=12, fontweight="bold", color=INK)

    def panel(column: int, top: float, tall: float) -> Axes:
        wide = PANEL if column < 2 else min(listed, PANEL)
        place = (LEFT + column * (PANEL + GAP), height - top - tall, wide, tall)
        axis: Axes = figure.add_axes((place[0] / width, place[1] / height, place[2] / width, place[3] / height))
        return axis

    colors = group_colors(len(report.groups))
    _draw_curves(panel(0, TITLE, curves), panel(1, TITLE, curves), report, colors)
    _draw_list(panel(2, TITLE, curves), entries, colors, curves)
    for place, key in enumerate(keys):
        top = TITLE + curves + BETWEEN + (place // 3) * (KEY + BETWEEN)
        draw_key(panel(place % 3, top, KEY), report, key, colors)
    return figure


def group_colors(count: int) -> list[str]:
    """Return a colour a group: few are easily told apart, many run through the rainbow from the best on."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count <= len(FEW_COLORS):
        return list(FEW_COLORS[:count])
    rainbow = [colormaps["turbo"](0.04 + 0.92 * place / (count - 1))[:3] for place in range(count)]
    # Its middle is too light for white paper: luminance is held down.
    light = [0.3 * red + 0.59 * green + 0.11 * blue for red, green, blue in rainbow]
    return [
        to_hex([part * min(1, MOST_LIGHT / shine) for part in color])
        for color, shine in zip(rainbow, light, strict=True)
    ]


def mean_curve(group: Group) -> tuple[Numbers, Numbers, Numbers]:
    """Return tokens, mean and sample SD of the validation loss, where every seed has one; SD 0 for one seed."""
    curves = [run.curve for run in group.runs]
    tokens = sorted(set(curves[0]).intersection(*curves[1:]))
    losses = np.array([[curve[at] for at in tokens] for curve in curves], dtype=np.float64)
    sd = losses.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(tokens))
    return np.array(tokens, dtype=np.float64), losses.mean(axis=0), sd


def _title(report: Report) -> str:
    runs = [run for group in report.groups for run in group.runs]
    counts = [len(group.runs) for group in report.groups]
    title = f"{len(counts)} configuration{'' if len(counts) == 1 else 's'}, {len(runs)} runs"
    if counts and min(counts) == max(counts) > 1:
        title = f"{len(counts)} configuration{'' if len(counts) == 1 else 's'}, {counts[0]} seeds each"
    sizes = {run.parameters for run in runs if run.parameters}
    if len(sizes) == 1:
        title += f", {sizes.pop() / 1e6:.3g}M parameters"
    return title + (f", {value_of(report.shared, 'data.name')}" if "data.name" in report.shared else "")


def _draw_curves(whole: Axes, closer: Axes, report: Report, colors: Sequence[str]) -> None:
    unfinished = [run.curve for run in report.left_out if len(run.curve) > 0]
    end = max([at for curve in (*unfinished, *(mean_curve(group)[0] for group in report.groups)) for at in curve] or [1])
    for axis, start, name in ((whole, 0.0, "validation loss (nats)"), (closer, CLOSER_FROM, "the later part, closer")):
        _dress(axis)
        _name(axis, name)
        _scale_tokens(axis, start * end, end)
        if not report.groups:
            for curve in unfinished:
                axis.plot(list(curve), list(curve.values()), color=FAINT, linewidth=0.8)
        ends = [_draw_group(axis, group, color, start * end) for group, color in zip(report.groups, colors, strict=True)]
        axis.margins(y=0.06)
        if axis is closer:
            _number_ends(axis, [one for one in ends if one is not None])


def _draw_group(axis: Axes, group: Group, color: str, start: float) -> tuple[float, str, str] | None:
    """Draw mean and band from `start` on; return the end's height, number and colour."""
    tokens, mean, sd = mean_curve(group)
    tokens, mean, sd = tokens[tokens >= start], mean[tokens >= start], sd[tokens >= start]
    if not tokens.size:
        return None
    axis.fill_between(tokens, mean - sd, mean + sd, color=color, alpha=0.18, linewidth=0)
    few = tokens.size <= 15
    # The best lies on top.
    axis.plot(tokens, mean, color=color, linewidth=1.3, marker="o" if few else None, markersize=3, zorder=3 - group.number / 1e3)
    return float(mean[-1]), str(group.number), color


def _scale_tokens(axis: Axes, start: float, end: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_xlim(start, start + (end - start) * 1.03)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_tick(value)))
    axis.set_xlabel("tokens", fontsize=9, color=INK)


def _number_ends(axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each curve's number beside its end, moved apart where two would overlap."""
    low, high = axis.get_ylim()
    heights = spread_apart([(value - low) / (high - low) for value, _, _ in sorted(ends)], 0.042)
    for height, (_, number, color) in zip(heights, sorted(ends), strict=True):
        axis.text(1.015, height, number, transform=axis.transAxes, color=color, fontsize=8.5, va="center", fontweight="bold")


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
    entries = [(f"{group.statistics[LOSS].mean:.3f}", label_of(group.settings, keys)) for group in report.groups]
    if len(entries) > MOST_LISTED:
        return [*entries[:MOST_LISTED], ("", f"and {len(entries) - MOST_LISTED} more, in report.csv")]
    return entries


def _draw_list(axis: Axes, entries: Sequence[tuple[str, str]], colors: Sequence[str], tall: float) -> None:
    """The groups by rank: number, mean final loss, label."""
    axis.set_axis_off()
    _name(axis, "final loss, the best first" if entries else "no complete run yet")
    wide = axis.get_position().width * axis.figure.get_figwidth()
    for place, ((loss, label), color) in enumerate(zip(entries, [*colors, FAINT], strict=False)):
        y = 1 - (place + 0.6) * LINE / tall
        number = str(place + 1) if loss else ""
        for x, text, weight in ((0.0, number, "bold"), (0.27, loss, "normal"), (0.72, label, "normal")):
            axis.text(x / wide, y, text, transform=axis.transAxes, fontsize=8.5, va="center", color=color if x == 0 else INK, fontweight=weight)
        axis.plot([], [])
