"""Compare topologies at one size, as a table and as drawings.

usage: python -m tiny_llm.topologies [num_models=4] [names=ring,base_k] [k=1] [seed=0] [plot=PATH]

  num_models  workers, 1..256
  names       topologies, comma-separated; all of them by default
  k           the largest degree of base_k, 1..num_models-1
  seed        the draw of random_matching and equidyn, 0 or more
  plot        draw the graphs into PATH (.png, .pdf or .svg; at most 64 workers)

One row a topology, with W its mixing matrices and J the matrix with 1/N everywhere:

  degree             most neighbours that a worker hears in one step
  doubly stochastic  rows and columns of every W sum to 1
  period             steps after which W repeats
  exact consensus    steps from the start of a period until every worker holds the mean of all
  spectral gap       of one period: 1 - largest singular value of (product of its W) - J; of one step of a
                     random topology: 1 - sqrt(largest eigenvalue of E[W^T W] - J)
  floats sent        by a worker in an update, in units of its D parameters; the mean over workers and a
                     period (64 steps of a random topology)

A drawing shows all steps of a period, or three draws of a random topology.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiny_llm import files
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import UserError, nearest
from tiny_llm.decentralized.topology import (
    RANDOM_TOPOLOGY_NAMES,
    TOPOLOGY_NAMES,
    Topology,
    TopologyError,
    check_doubly_stochastic,
    degree,
    floats_sent,
    make_topology,
    spectral_gap,
    steps_to_exact_consensus,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

KEYS = ("num_models", "names", "k", "seed", "plot")
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
MOST_WORKERS = 256
MOST_WORKERS_DRAWN = 64
DRAWS_SHOWN = 3
"""How many steps of a random topology are drawn."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for, checked."""

    num_models: int
    names: tuple[str, ...]
    k: int
    seed: int
    plot: Path | None


def main(arguments: list[str]) -> None:
    """Print the table, draw the graphs if asked to. Mistakes end in one line on stderr and exit code 2."""
    with user_errors_in_one_line():
        if {"-h", "--help"} & set(arguments):
            print(__doc__)
            return
        request = parse(arguments)
        topologies = {name: build(name, request) for name in request.names}
        show(comparison(request.num_models, topologies))
        if request.plot is not None:
            allowed = [topology for topology in topologies.values() if isinstance(topology, Topology)]
            draw(allowed, request.plot)
            print(f"drawn in {request.plot}")


def parse(arguments: list[str]) -> Request:
    """Read key=value arguments; raises UserError for a wrong key, value or combination."""
    values: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in KEYS or not value:
            hint = nearest(key, KEYS) if key not in KEYS else f"; write {key}=VALUE"
            raise UserError(f"argument '{argument}': allowed are {', '.join(f'{k}=...' for k in KEYS)}{hint}")
        if key in values:
            raise UserError(f"{key}={value}: {key} is already {values[key]}; give it once")
        values[key] = value
    num_models = _whole_number("num_models", values.get("num_models", "4"), 1, MOST_WORKERS)
    names = tuple(dict.fromkeys(values["names"].split(","))) if "names" in values else TOPOLOGY_NAMES
    for name in names:
        if name not in TOPOLOGY_NAMES:
            hint = nearest(name, TOPOLOGY_NAMES)
            raise UserError(f"names={name}: allowed are {', '.join(TOPOLOGY_NAMES)}{hint}")
    for key, readers in (("k", ("base_k",)), ("seed", RANDOM_TOPOLOGY_NAMES)):
        if key in values and not set(readers) & set(names):
            raise UserError(f"{key}={values[key]}: {' or '.join(readers)} must be in names to read it")
    return Request(
        num_models=num_models,
        names=names,
        k=_whole_number("k", values.get("k", "1"), 1, max(1, num_models - 1)),
        seed=_whole_number("seed", values.get("seed", "0"), 0, 2**63 - 1),
        plot=_plot_path(values["plot"], num_models) if "plot" in values else None,
    )


def _whole_number(key: str, value: str, lowest: int, highest: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = lowest - 1
    if not lowest <= number <= highest:
        raise UserError(f"{key}={value}: allowed are whole numbers in {lowest}..{highest}")
    return number


def _plot_path(value: str, num_models: int) -> Path:
    path = Path(value)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(f"plot={value}: allowed are names that end in {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"plot={value}: there is no directory {path.parent}; make it or name another")
    if num_models > MOST_WORKERS_DRAWN:
        raise UserError(f"plot={value}: allowed with num_models in 1..{MOST_WORKERS_DRAWN}, got {num_models}")
    return path


def build(name: str, request: Request) -> Topology | TopologyError:
    """Return the topology, or the error with which it refuses the size."""
    try:
        return make_topology(name, request.num_models, request.k, request.seed)
    except TopologyError as refusal:
        return refusal


def comparison(num_models: int, topologies: dict[str, Topology | TopologyError]) -> Table:
    """Return the table, one row a topology; one that refuses the size gives its reason below."""
    from rich import box
    from rich.table import Table

    refusals = [f"{topology}" for topology in topologies.values() if isinstance(topology, TopologyError)]
    table = Table(
        title=f"Topologies of {num_models} workers",
        caption="\n".join(refusals),
        caption_justify="left",
        caption_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("topology", no_wrap=True)
    for header in (
        "degree",
        "doubly\nstochastic",
        "period",
        "exact\nconsensus",
        "spectral\ngap",
        "floats\nsent",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for name, topology in topologies.items():
        if isinstance(topology, TopologyError):
            table.add_row(name, "refused", *"-----")
        else:
            table.add_row(name, *measurements(topology))
    return table


def measurements(topology: Topology) -> list[str]:
    """Return the cells of a row, after the name."""
    try:
        check_doubly_stochastic(topology)
        doubly_stochastic = "yes"
    except TopologyError:
        doubly_stochastic = "no"
    steps = steps_to_exact_consensus(topology)
    return [
        str(degree(topology)),
        doubly_stochastic,
        "random" if topology.period is None else str(topology.period),
        "never" if steps is None else str(steps),
        f"{spectral_gap(topology):.4f}",
        f"{floats_sent(topology):.2f} D",
    ]


def show(table: Table) -> None:
    """Print the table: as wide as the terminal, or uncut where there is no terminal."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def draw(topologies: list[Topology], path: Path) -> None:
    """Draw each topology in a panel of one figure; the file is whole or absent."""
    from matplotlib.figure import Figure

    if not topologies:
        raise UserError(f"plot={path}: nothing to draw, no topology in names allows this num_models")
    columns = min(5, len(topologies))
    rows = math.ceil(len(topologies) / columns)
    figure = Figure(figsize=(max(5, 3 * columns), 3.6 * rows + 0.4), layout="constrained")
    figure.suptitle("arrow: to the worker that hears · line: both hear · thicker: larger weight", fontsize=9)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels:
        panel.set_axis_off()
    for panel, topology in zip(panels, topologies, strict=False):
        draw_graph(panel, topology)
    kind = path.suffix.lower().removeprefix(".")
    files.write_whole(path, lambda file: figure.savefig(file, format=kind, dpi=150))


def draw_graph(panel: Axes, topology: Topology) -> None:
    """Draw the workers on a circle and who hears whom, one colour a step."""
    from matplotlib import colormaps

    n = topology.num_models
    places = [(math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)]
    radius, fontsize = (6.5, 8) if n <= 16 else (3.5, 4)  # of a worker's disc, in points
    steps = topology.period or DRAWS_SHOWN
    for t in range(steps):
        colour = colormaps["viridis"](0.9 * t / (steps - 1)) if steps > 1 else "0.35"
        draw_edges(panel, topology, t, places, radius, colour)
        if steps > 1:
            panel.plot([], [], color=colour, label=f"{t}")
    x, y = zip(*places, strict=True)
    panel.scatter(x, y, s=(2 * radius) ** 2, color="white", edgecolor="black", zorder=3)
    for i, place in enumerate(places):
        panel.annotate(f"{i}", place, ha="center", va="center_baseline", fontsize=fontsize, zorder=4)
    title = f"{topology.name}, k={topology.k}" if topology.name == "base_k" else topology.name
    panel.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal", title=title)
    if steps > 1:
        legend_title = "step" if topology.period else "draw"
        panel.legend(
            title=legend_title,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.04),
            ncols=min(steps, 8),
            frameon=False,
            fontsize=8,
            title_fontsize=8,
            handlelength=1,
            handletextpad=0.4,
            columnspacing=0.8,
        )


def draw_edges(
    panel: Axes, topology: Topology, t: int, places: list[tuple[float, float]], radius: float, colour: object
) -> None:
    """Draw who hears whom at step t; later steps bend more, so that a pair that meets twice shows twice."""
    from matplotlib.patches import FancyArrowPatch

    rows = enumerate(topology.peers(t))
    weights = {(peer, worker): weight for worker, row in rows for peer, weight in row if peer != worker}
    for (sender, hearer), weight in weights.items():
        mutual = (hearer, sender) in weights
        if mutual and sender > hearer:
            continue
        arrow = FancyArrowPatch(
            places[sender],
            places[hearer],
            arrowstyle="-" if mutual else "-|>",
            connectionstyle=f"arc3,rad={0.12 * t}",
            shrinkA=radius,
            shrinkB=radius,
            mutation_scale=8,
            linewidth=(0.5 + 1.5 * weight) * min(1, 16 / len(places)),
            color=colour,
        )
        panel.add_patch(arrow)


if __name__ == "__main__":
    main(sys.argv[1:])
