"""A report on the terminal. Nothing is cut, neither in a pipe nor in a narrow window."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiny_llm.analysis.groups import Report
from tiny_llm.analysis.paired import Difference
from tiny_llm.analysis.tables import (
    TextTable,
    comparison_lines,
    footnotes,
    group_table,
    headline,
    left_out_lines,
)


def show(report: Report, against: Mapping[int, Difference] | None, compared: Difference | None) -> None:
    """Print how many runs there are, the table, its footnotes, the comparison and the runs left out."""
    print(headline(report))
    if report.groups:
        # A width that no table has: a row is one line, which a narrow window wraps and a pipe keeps.
        Console(width=10_000).print(rich_table(group_table(report, against)))
        for note in footnotes(report, against):
            print(note)
    if compared is not None:
        print("\n" + "\n  ".join(comparison_lines(report, compared)))
    if report.left_out:
        print("\nleft out of every mean:")
        for run in report.left_out:
            print("  " + "\n              ".join(left_out_lines(run)))
    print()


def rich_table(table: TextTable) -> Table:
    """Return the table for rich; a key stands in two lines, section above, and no cell is read as markup."""
    rich = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header, numeric in zip(table.headers, table.numeric, strict=True):
        rich.add_column(
            Text(header.replace(".", ".\n", 1)), justify="right" if numeric else "left", no_wrap=True
        )
    for row in table.rows:
        rich.add_row(*(Text(cell) for cell in row))
    return rich
