"""The tables of a report as rows of text, which the terminal and report.md show alike.

Loss is the mean over seeds of the final loss in nats: token-weighted cross-entropy of the workers' average on
the whole validation split. `±` and SD are sample SDs over seeds. Hours are those spent in updates, consensus
error is that of the last train row: the mean of ||x_i - mean||^2 over ||mean||^2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tiny_llm.analysis.groups import Group, Report, Statistic
from tiny_llm.analysis.keys import MISSING, label_of, value_of
from tiny_llm.analysis.paired import Difference
from tiny_llm.analysis.runs import CONSENSUS, HOURS, LOSS, SPEED, RunRecord

UNPAIRED = "*"


@dataclass(frozen=True)
class TextTable:
    """`numeric` tells the columns that are set flush right."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]


def group_table(report: Report, against: Mapping[int, Difference] | None = None) -> TextTable:
    """Return one row a group. `against`: each group's difference from its baseline, if there is one."""
    measured = ["loss", "SD", "n", "best", "tokens/s", "hours", "consensus error"]
    if against is not None:
        measured.insert(4, "minus baseline")
    headers = ("#", *report.keys, *measured)
    rows = [_cells(group, report.keys, against) for group in report.groups]
    return TextTable(headers, tuple(rows), (True, *[False] * len(report.keys), *[True] * len(measured)))


def _cells(group: Group, keys: tuple[str, ...], against: Mapping[int, Difference] | None) -> tuple[str, ...]:
    loss = group.statistics[LOSS]
    cells = [
        str(group.number),
        *(value_of(group.settings, key) for key in keys),
        f"{loss.mean:.4f}",
        MISSING if loss.sd is None else f"{loss.sd:.4f}",
        str(loss.n),
        f"{loss.best:.4f}",
    ]
    if against is not None:
        cells.append(_difference_cell(against.get(group.number)))
    return (*cells, *(_spread(group.statistics.get(name)) for name in (SPEED, HOURS, CONSENSUS)))


def _spread(statistic: Statistic | None) -> str:
    """Return mean ± SD: the mean with three digits or all before the point, the SD with as many decimals."""
    if statistic is None:
        return MISSING
    exponent = math.floor(math.log10(statistic.mean)) if statistic.mean > 0 else 0
    if exponent < -2:  # 1.44e-03: both in the mean's power of ten
        power = 10.0**exponent
        shown = f"{statistic.mean / power:.2f}"
        spread = "" if statistic.sd is None else f" ± {statistic.sd / power:.2f}"
        return f"({shown}{spread})e{exponent}" if spread else f"{shown}e{exponent}"
    decimals = max(0, 2 - exponent)
    shown = f"{statistic.mean:,.{decimals}f}"
    return shown if statistic.sd is None else f"{shown} ± {statistic.sd:,.{decimals}f}"


def _difference_cell(one: Difference | None) -> str:
    if one is None:
        return MISSING
    if one.one == one.other:
        return "baseline"
    if not one.seeds:
        return f"{one.mean:+.4f} {UNPAIRED}"
    return f"{one.mean:+.4f}" if one.sd is None else f"{one.mean:+.4f} ± {one.sd:.4f}"


def headline(report: Report) -> str:
    """Return how many runs there are and how they stand."""
    complete = sum(len(group.runs) for group in report.groups)
    total = complete + len(report.left_out)
    parts = [f"{complete} complete in {_count(len(report.groups), 'configuration')}"]
    parts += [f"{n} {status}" for status, n in sorted(Counter(run.status for run in report.left_out).items())]
    return f"{_count(total, 'run')}: {', '.join(parts)}"


def left_out_lines(run: RunRecord) -> tuple[str, str]:
    """Return who a run is that is in no mean, and how far and why."""
    facts = []
    if run.update is not None:
        facts.append(f"update {run.update:,}" + (f" of {run.updates:,}" if run.updates else ""))
    if run.loss is not None:
        facts.append(f"loss {run.loss:.4f}")
    progress = ", ".join(facts) or "no rows yet"
    return f"{run.status:<11} {run.directory}", f"{progress}; {run.reason}" if run.reason else progress


def comparison_lines(report: Report, one: Difference) -> list[str]:
    """Return what compare=A,B found."""
    labels = [
        f"{number} ({label_of(report.groups[number - 1].settings, report.keys)})"
        for number in (one.one, one.other)
    ]
    seeds = f"{_count(len(one.seeds), 'shared seed')} ({', '.join(str(seed) for seed in one.seeds)})"
    lines = [f"loss of {labels[0]} minus loss of {labels[1]}"]
    if one.sd is None or one.low is None or one.high is None:
        return [*lines, f"{one.mean:+.4f} over {seeds}; an SD and an interval need two"]
    interval = f"95 % interval {one.low:+.4f} to {one.high:+.4f} (Student t, {len(one.seeds) - 1} df)"
    return [*lines, f"{one.mean:+.4f}, SD {one.sd:.4f} over {seeds}, {interval}"]


def footnotes(report: Report, against: Mapping[int, Difference] | None) -> list[str]:
    """Return what the table's reader must know."""
    notes = list(report.notes)
    if against is not None:
        alone = [group.number for group in report.groups if group.number not in against]
        unpaired = [one for one in against.values() if one.one != one.other and not one.seeds]
        if any(one.seeds and one.one != one.other for one in against.values()):
            notes.append("minus baseline: mean ± SD of the differences over shared seeds")
        if unpaired:
            notes.append(f"{UNPAIRED} no seed is shared: the difference of the two means")
        if alone:
            listed = ", ".join(str(number) for number in alone)
            notes.append(f"no single baseline is otherwise equal to: {listed}; compare=A,B compares any two")
    return notes


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
