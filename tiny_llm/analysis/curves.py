"""loss.png: one run's picture, from the rows of metrics.jsonl.

The panels share the tokens axis: the loss (train as a light line, validation as marked points), for
decentralized runs the consensus error with gamma, and the learning rate. The spread of the workers' losses is
a band around the train loss. Nothing global of matplotlib is touched, so a picture can be drawn in the middle
of anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tiny_llm import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Numbers = npt.NDArray[np.float64]

INK, FAINT = "#333333", "#777777"
TRAIN, TRAIN_LABEL, VALIDATION = "#7fb2de", "#4a86b8", "#c8452d"
CONSENSUS, GAMMA, RATE = "#2f7f6d", "#a87d00", "#6b6b6b"

MOST_POINTS = 500  # a curve of more train rows is drawn from means of neighbours, and says so

# Where the close-up of the second half stands in the loss panel, in shares of the panel.
CLOSE_UP_LEFT, CLOSE_UP_BOTTOM, CLOSE_UP_WIDTH, CLOSE_UP_HEIGHT = 0.36, 0.42, 0.62, 0.52


def plot_run(rows: Sequence[Row] | Path | str, out: Path, title: str) -> None:
    """Draw the run of `rows` (or of a metrics.jsonl) into the PNG `out`, whole or not at all.

    Loss in nats against tokens. Numbers that are not finite are left out.
    """
    if isinstance(rows, str | Path):
        rows = read_rows(Path(rows))
    _save(draw_run(rows, title), Path(out))


def read_rows(path: Path) -> list[Row]:
    """Read a metrics.jsonl; a last line that a crash cut short is no row."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw_run(rows: Sequence[Row], title: str) -> Figure:
    """Return the figure: a loss panel, a consensus panel if workers ever differed, the learning rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = condense(rows)
    train = _of(rows, "train")
    consensus = bool(np.any(_series(train, "relative_consensus_error")[1] > 0))
    heights = [3.2, 1.1, 0.7] if consensus else [3.2, 0.7]
    figure_height = 1.15 + 0.4 * (len(heights) - 1) + sum(heights)
    figure = Figure(figsize=(8, figure_height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=0.08, right=0.82, top=1 - 0.65 / figure_height, bottom=0.5 / figure_height, hspace=0.26
    )
    figure.text(0.08, 1 - 0.28 / figure_height, title, fontsize=12, fontweight="bold", color=INK)

    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for panel in panels:
        dress(panel)
    _scale_tokens(panels[-1], rows)
    _draw_rate(panels[-1], train)
    if consensus:
        _draw_consensus(panels[1], train)
    _draw_loss(panels[0], rows)
    return figure


def condense(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with at most MOST_POINTS train rows: means of neighbours; `rows` tells of how many.

    Each worker's losses are averaged by themselves, so the band becomes the spread of the workers' means. A
    group stands at its last row's tokens; a remainder at the end is a smaller group.
    """
    train = _of(rows, "train")
    size = -(-len(train) // MOST_POINTS)
    if size <= 1:
        return list(rows)
    condensed = [row for row in rows if row["event"] != "train"]
    for start in range(0, len(train), size):
        group = train[start : start + size]
        mean: dict[str, Any] = {"event": "train", "tokens": group[-1]["tokens"], "rows": len(group)}
        for key in ("loss", "lr", "relative_consensus_error", "mixing_gamma"):
            mean[key] = float(_column(group, key).mean())
        if "local_losses" in group[0]:
            mean["local_losses"] = np.mean([row["local_losses"] for row in group], axis=0).tolist()
        condensed.append(mean)
    return condensed


def _draw_loss(axis: Axes, rows: Sequence[Row]) -> None:
    name_axis(axis, "loss (nats)")
    _draw_losses(axis, rows)
    _label_ends(axis, _end_labels(rows))
    if not rows:
        axis.text(0.5, 0.5, "no rows yet", transform=axis.transAxes, ha="center", color=FAINT)
        axis.set(xticks=[], yticks=[])
    elif _leaves_room(axis, rows):
        _draw_close_up(axis, rows)


def _draw_close_up(axis: Axes, rows: Sequence[Row]) -> None:
    """The second half of the run, in the empty corner that a loss curve leaves."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    corner = (CLOSE_UP_LEFT - 0.08, CLOSE_UP_BOTTOM - 0.08)
    axis.add_patch(Rectangle(corner, 1, 1, transform=axis.transAxes, color="white", zorder=1))
    close_up = axis.inset_axes((CLOSE_UP_LEFT, CLOSE_UP_BOTTOM, CLOSE_UP_WIDTH, CLOSE_UP_HEIGHT))
    dress(close_up)
    close_up.tick_params(labelsize=8)
    close_up.set_title("the second half, closer", loc="left", fontsize=8, color=FAINT, pad=3)
    _scale_tokens(close_up, rows)
    half = close_up.get_xlim()[1] / 2
    close_up.set_xlim(left=half)
    close_up.xaxis.set_major_locator(MaxNLocator(6))
    close_up.yaxis.set_major_locator(MaxNLocator(5))
    _draw_losses(close_up, [row for row in rows if row["tokens"] >= half])


def _draw_losses(axis: Axes, rows: Sequence[Row]) -> None:
    packed = [row for row in rows if len(row.get("local_losses", ())) > 1]
    low = np.array([min(row["local_losses"]) for row in packed])
    high = np.array([max(row["local_losses"]) for row in packed])
    axis.fill_between(_column(packed, "tokens"), low, high, color=TRAIN, alpha=0.35, linewidth=0)
    _line(axis, *_series(_of(rows, "train"), "loss"), TRAIN)
    tokens, loss = _series(_of(rows, "validation"), "loss")
    size = 4.5 if loss.size <= 60 else 3
    axis.plot(tokens, loss, color=VALIDATION, linewidth=1, marker="o", markersize=size, zorder=3)
    axis.plot(
        *_series(_of(rows, "final_validation"), "loss"),
        color=VALIDATION,
        marker="o",
        markersize=9,
        markerfacecolor="none",
        clip_on=False,
        zorder=4,
    )


def _end_labels(rows: Sequence[Row]) -> list[tuple[float, str, str]]:
    """Return (loss, text, color) for the end of each curve; the final validation stands for the others."""
    labels = []
    names = {"train": "train", "validation": "validation", "final_validation": "final validation"}
    for event, name in names.items():
        _, loss = _series(_of(rows, event), "loss")
        if loss.size and event == "train":
            first = _of(rows, event)[0]
            if (workers := len(first.get("local_losses", ()))) > 1:
                name += f"\n({workers} workers)"
            if (group := first.get("rows", 1)) > 1:
                name += f"\n{group}-row means"
            labels.append((loss[-1], name, TRAIN_LABEL))
        elif loss.size:
            labels = [label for label in labels if label[2] != VALIDATION]
            labels.append((loss[-1], f"{name}\n{loss[-1]:.3f} nats", VALIDATION))
    return labels


def _leaves_room(axis: Axes, rows: Sequence[Row]) -> bool:
    """Whether the curves pass below the close-up's place, and there is a second half to look at."""
    low, high = axis.get_ylim()
    end = axis.get_xlim()[1]
    tokens, loss = _series(rows, "loss")
    beside = loss[tokens >= (CLOSE_UP_LEFT - 0.08) * end]
    limit = low + (CLOSE_UP_BOTTOM - 0.12) * (high - low)
    return int(np.sum(tokens >= end / 2)) >= 8 and bool(np.all(beside < limit))


def _draw_consensus(axis: Axes, train: Sequence[Row]) -> None:
    """The error's scale is logarithmic: exact consensus (0) is a gap. A gamma that stays 1 is not drawn."""
    from matplotlib.ticker import NullFormatter

    name_axis(axis, "relative consensus error", CONSENSUS)
    tokens, error = _series(train, "relative_consensus_error")
    tokens, error = tokens[error > 0], error[error > 0]
    _line(axis, tokens, error, CONSENSUS)
    axis.set_yscale("log")
    # Workers start equal: the first rows would stretch the axis over many empty decades.
    axis.set_ylim(min(np.quantile(error, 0.03) / 2, error.max() / 20), error.max() * 2)
    axis.yaxis.set_minor_formatter(NullFormatter())
    tokens, gamma = _series(train, "mixing_gamma")
    if np.any(gamma != 1):
        second = axis.twinx()
        dress(second)
        second.grid(False)
        _line(second, tokens, gamma, GAMMA)
        second.set_ylim(0, 1.1)
        second.set_yticks([0, 0.5, 1])
        second.tick_params(axis="y", labelcolor=GAMMA)
        second.set_title("gamma", loc="right", fontsize=9, color=GAMMA, pad=4)


def _draw_rate(axis: Axes, train: Sequence[Row]) -> None:
    name_axis(axis, "learning rate")
    tokens, rate = _series(train, "lr")
    _line(axis, tokens, rate, RATE)
    axis.fill_between(tokens, 0, rate, color=RATE, alpha=0.12, linewidth=0)
    if peak := rate.max(initial=0):
        axis.set_ylim(0, 1.12 * peak)
        axis.set_yticks([0, peak], ["0", f"{peak:.2g}"])
    else:
        axis.set_yticks([])
    axis.set_xlabel("tokens", fontsize=9, color=INK)


def _line(axis: Axes, x: Numbers, y: Numbers, color: str) -> None:
    """A line; a single point, which a line would hide, gets a dot."""
    axis.plot(x, y, color=color, linewidth=1.2, marker="o" if x.size == 1 else None, markersize=4)


def _label_ends(axis: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write each label beside the end of its curve, moved up where two would overlap."""
    low, high = axis.get_ylim()
    floor = 0.0
    for value, text, color in sorted(labels):
        half_height = 0.035 * len(text.splitlines())
        height = max((value - low) / (high - low), floor + half_height)
        axis.text(1.02, height, text, transform=axis.transAxes, color=color, fontsize=9, va="center")
        floor = height + half_height


def name_axis(axis: Axes, text: str, color: str = INK) -> None:
    axis.set_title(text, loc="left", fontsize=9, color=color, pad=4)


def dress(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#bbbbbb")
    axis.tick_params(which="both", color="#bbbbbb", labelcolor="#555555", labelsize=9, length=3)
    axis.grid(True, color="#e9e9e9", linewidth=0.7)
    axis.set_axisbelow(True)


def _scale_tokens(axis: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_tick(value)))
    axis.set_xlim(0, 1.015 * max([row["tokens"] for row in rows], default=1))


def tokens_tick(value: float) -> str:
    """Write 0, 500k, 2.5M, 1.2B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _of(rows: Sequence[Row], event: str) -> list[Row]:
    return [row for row in rows if row["event"] == event]


def _column(rows: Sequence[Row], key: str) -> Numbers:
    """Return one number a row, NaN where a row has none."""
    values = [row.get(key) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _series(rows: Sequence[Row], key: str) -> tuple[Numbers, Numbers]:
    """Return tokens and `key` of the rows in which `key` is finite."""
    tokens, values = _column(rows, "tokens"), _column(rows, key)
    finite = np.isfinite(values)
    return tokens[finite], values[finite]


def _save(figure: Figure, out: Path) -> None:
    files.write_whole(out, lambda file: figure.savefig(file, format="png"))
