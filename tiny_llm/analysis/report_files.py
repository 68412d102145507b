"""report.csv, report.json and report.md: one report for spreadsheets, programs and readers.

The CSV has a row a group with unrounded numbers; the JSON has moreover every run, also those left out, and the
settings that all share; the Markdown is the terminal's table with its definitions and the picture.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_llm import files
from tiny_llm.analysis.groups import Group, Report
from tiny_llm.analysis.keys import value_of
from tiny_llm.analysis.paired import Difference
from tiny_llm.analysis.runs import METRICS, RunRecord
from tiny_llm.analysis.tables import (
    TextTable,
    comparison_lines,
    footnotes,
    group_table,
    headline,
    left_out_lines,
)

Against = Mapping[int, Difference] | None


def write_csv(path: Path, report: Report, against: Against) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    parts = ("mean", "sd", "n", "best")
    measured = [f"{name}_{part}" for name in METRICS for part in parts]
    difference = ["baseline", "minus_baseline", "minus_baseline_sd", "pairs"] if against is not None else []
    writer.writerow(["rank", *report.keys, *measured, *difference, "seeds"])
    for group in report.groups:
        statistics = [group.statistics.get(name) for name in METRICS]
        numbers = [getattr(one, part) if one else None for one in statistics for part in parts]
        writer.writerow(
            [
                group.number,
                *(value_of(group.settings, key) if key in group.settings else None for key in report.keys),
                *numbers,
                *(_difference_columns(against.get(group.number)) if against is not None else []),
                " ".join(str(seed) for seed in group.seeds),
            ]
        )
    files.write_text(path, text.getvalue())


def _difference_columns(one: Difference | None) -> list[Any]:
    return [None] * 4 if one is None else [one.other, one.mean, one.sd, len(one.seeds)]


def write_json(
    path: Path, report: Report, against: Against, compared: Difference | None, origin: Mapping[str, Any]
) -> None:
    """`origin`: what made the report, put first."""
    value = {
        **origin,
        "runs": headline(report),
        "varying": list(report.keys),
        "shared": dict(report.shared),
        "groups": [_plain_group(group, report, against) for group in report.groups],
        "left_out": [_plain_left_out(run) for run in report.left_out],
        "comparison": dataclasses.asdict(compared) if compared else None,
        "notes": footnotes(report, against),
    }
    files.write_json(path, value)


def _plain_group(group: Group, report: Report, against: Against) -> dict[str, Any]:
    one = None if against is None else against.get(group.number)
    return {
        "rank": group.number,
        "settings": {key: group.settings[key] for key in report.keys if key in group.settings},
        "seeds": list(group.seeds),
        **{name: dataclasses.asdict(statistic) for name, statistic in group.statistics.items()},
        "minus_baseline": dataclasses.asdict(one) if one else None,
        "runs": [{"directory": str(run.directory), "seed": run.seed, **run.metrics} for run in group.runs],
    }


def _plain_left_out(run: RunRecord) -> dict[str, Any]:
    names = ("status", "seed", "settings", "update", "updates", "loss", "reason")
    return {"directory": str(run.directory), **{name: getattr(run, name) for name in names}}


def write_markdown(
    path: Path, report: Report, against: Against, compared: Difference | None, command: str, picture: str
) -> None:
    lines = ["# Report", "", f"{headline(report)}. Made by", "", f"    {command}", ""]
    if report.groups:
        lines += [*markdown_table(group_table(report, against)), "", DEFINITIONS]
        lines += [f"- {note}" for note in footnotes(report, against)]
    if compared is not None:
        lines += ["", "## Comparison", "", ":\n".join(comparison_lines(report, compared)) + "."]
    lines += ["", f"![Loss against tokens, and final loss against each swept key]({picture})"]
    if report.left_out:
        lines += ["", "## Left out of every mean", ""]
        for run in report.left_out:
            who, why = left_out_lines(run)
            lines.append(f"- `{' '.join(who.split())}`: {why}")
    files.write_text(path, "\n".join(lines) + "\n")


DEFINITIONS = """\
- loss: final loss on the whole validation split, token-weighted cross-entropy in nats, mean over n seeds
- SD and ±: sample standard deviation over seeds; best: of the n final losses
- hours: spent in updates; consensus error: of the last train row, mean ||x_i - mean||² / ||mean||²"""


def markdown_table(table: TextTable) -> list[str]:
    rule = ["--:" if numeric else ":--" for numeric in table.numeric]
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (table.headers, rule, *table.rows)
    ]
