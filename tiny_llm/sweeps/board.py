"""What a sweep shows while it runs, and what it says at the end.

On a terminal a live table; elsewhere a plain line for each change and, once a minute, how far the running
ones are. At the end every point that is not done is listed with its overrides, its last words and its
directory.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tiny_llm.sweeps.crew import Crew
from tiny_llm.sweeps.points import Point
from tiny_llm.sweeps.states import LABELS, Label, Standing, last_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SUMMARY_SECONDS = 60.0
ERROR_LINES = 5
STYLES = {
    "done": "green",
    "running": "cyan",
    "failed": "red",
    "lost": "red",
    "interrupted": "yellow",
    "waiting": "dim",
}
FIRST_SHOWN: tuple[Label, ...] = ("running", "failed", "lost", "interrupted", "waiting", "done")


@dataclass(frozen=True)
class Row:
    """A point as it stands at one moment."""

    point: Point
    label: Label
    standing: Standing
    place: str = ""

    @property
    def progress(self) -> str:
        total = self.standing.updates or self.point.plan.updates
        return f"{self.standing.update:,}/{total:,}" if self.standing.update else ""

    @property
    def loss(self) -> str:
        return "" if self.standing.loss is None else f"{self.standing.loss:.4f}"

    @property
    def left(self) -> str:
        if self.label != "running" or self.standing.seconds_left is None:
            return ""
        minutes, seconds = divmod(round(self.standing.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def count_labels(rows: Sequence[Row]) -> str:
    counts = Counter(row.label for row in rows)
    shown = [label for label in LABELS if counts[label] or label not in ("interrupted",)]
    return ", ".join(f"{counts[label]} {label}" for label in shown)


class Board:
    """Shows the rows of one sweep; a context manager, since a live table must give the terminal back."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.name = name
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._labels: dict[str, Label] = {}
        self._summary = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, rows: Sequence[Row]) -> None:
        if self._live:
            self._live.update(table(self.name, rows, self._console.height - 4), refresh=True)
            return
        for row in rows:
            if self._labels.get(row.point.name, "waiting") != row.label:
                self._say(plain_line(row))
            self._labels[row.point.name] = row.label
        if time.monotonic() - self._summary >= SUMMARY_SECONDS:
            self._summary = time.monotonic()
            self._say(count_labels(rows))
            for row in rows:
                if row.label == "running" and row.progress:
                    self._say(
                        f"            {row.point.name}  update {row.progress}  loss {row.loss}  {row.left} left"
                    )

    def _say(self, line: str) -> None:
        print(line, flush=True)


def plain_line(row: Row) -> str:
    facts = {
        "running": row.place,
        "waiting": row.place,
        "done": f"loss {row.loss}",
        "failed": row.standing.error or "",
    }
    return f"{row.label:<11} {row.point.name}  {facts.get(row.label, '')}".rstrip()


def table(name: str, rows: Sequence[Row], most: int) -> Table:
    """Return the live table: what runs first, then what went wrong, as many rows as the screen takes."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=f"{name}: {count_labels(rows)}", title_justify="left", expand=False)
    for heading in ("point", "state", "update", "loss", "left", "where"):
        drawn.add_column(heading, justify="right" if heading in ("update", "loss", "left") else "left")
    order = sorted(rows, key=lambda row: FIRST_SHOWN.index(row.label))
    for row in order[: max(1, most)]:
        state = Text(row.label, style=STYLES[row.label])
        drawn.add_row(Text(row.point.name), state, row.progress, row.loss, row.left, Text(row.place))
    if len(order) > max(1, most):
        drawn.caption = f"and {len(order) - max(1, most)} more"
    return drawn


def tell_end(rows: Sequence[Row], crew: Crew) -> None:
    """Print every point that is not done with its overrides, last words and directory, then the counts."""
    for row in rows:
        if row.label == "done":
            continue
        print(f"\n{row.label}: {row.point.name}", file=sys.stderr)
        print(f"  overrides  {' '.join(row.point.overrides)}", file=sys.stderr)
        for line in _last_words(row, crew):
            print(f"  error      {line}", file=sys.stderr)
        print(f"  directory  {row.point.directory}", file=sys.stderr)
    print(f"\n{count_labels(rows)}")


def _last_words(row: Row, crew: Crew) -> list[str]:
    """Return why a point is not done: the end of its log, what status.json says and what the crew knows."""
    if row.label == "waiting":
        return []
    log = crew.log(row.point.name)
    lines = _from_the_error_on(last_lines(log, 20)) if log else []
    stated = row.standing.error or ""
    message = stated.partition(": ")[2] or stated
    told = [] if any(message in line for line in lines) else [stated]
    return [*lines, *told, *filter(None, [crew.verdict(row.point.name)])]


def _from_the_error_on(lines: list[str]) -> list[str]:
    """Return the last lines, few of them, and none that came before the error itself."""
    starts = [number for number, line in enumerate(lines) if line.startswith(("error: ", "Traceback "))]
    return lines[max(starts[-1] if starts else 0, len(lines) - ERROR_LINES) :]
