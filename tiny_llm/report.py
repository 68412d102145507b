"""Sum up finished and unfinished runs from their directories alone.

usage: python -m tiny_llm.report DIR... [compare=A,B] [baseline=KEY=VALUE] [out=DIR]

  DIR       a run, a sweep (outputs/sweeps/NAME) or any folder with runs below it; hidden folders are skipped
  compare   two groups, each a number of the table or KEY=VALUE conditions joined by +: the differences in loss
            over the seeds that both have, their SD and a 95 % interval
  baseline  adds the difference in loss from the group with this value and otherwise equal settings
  out       where report.csv, .json, .md and .png are written; by default into the first DIR

KEY is a config key, whole or short: optimizer.lr or lr, topology.name or topology, decentralized.scheme or
scheme. Numbers of the table move while runs finish; conditions do not.

  python -m tiny_llm.report outputs/sweeps/NAME compare=1,2 baseline=topology=complete
  python -m tiny_llm.report outputs/sweeps/NAME compare=scheme=awc+topology=ring,scheme=awc+topology=complete

One row a group: the complete runs that differ in runtime.seed alone, ranked by mean loss (ties: the lower lr,
beta1, beta2). Columns: the keys that vary; - where a configuration has no such key.

  loss, SD, n, best  final loss on the whole validation split in nats: mean over n seeds, sample SD, lowest
  tokens/s, hours    mean and SD over the seeds; hours are those spent in updates
  consensus error    of the last train row, relative: mean ||x_i - mean||^2 / ||mean||^2

Runs that are waiting, running, interrupted, failed, lost (their process is gone) or damaged, or that repeat a
seed, are listed with their progress and error, and are in no mean.
"""

from __future__ import annotations

import datetime
import io
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tiny_llm.analysis.choice import baselines, compared_groups
from tiny_llm.analysis.groups import Report, make_report
from tiny_llm.analysis.paired import Difference, difference
from tiny_llm.analysis.runs import find_runs, read_run
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import UserError, nearest

KEYS = ("compare", "baseline", "out")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    folders: tuple[Path, ...]
    compare: str | None
    baseline: str | None
    out: Path


def main(arguments: list[str]) -> None:
    """Print the report and write its files. Mistakes end in one line on stderr and exit code 2."""
    with user_errors_in_one_line():
        if {"-h", "--help"} & set(arguments):
            print(__doc__)
            return
        request = parse(arguments)
        report = make_report([read_run(directory) for directory in find_runs(request.folders)])
        against = _against(report, request.baseline)
        compared = difference(*compared_groups(report, request.compare)) if request.compare else None
        command = shlex.join(["python", "-m", "tiny_llm.report", *arguments])
        try:
            _write(request.out, report, against, compared, command)
        finally:  # a table that was asked for is worth showing where nothing can be written
            _show(report, against, compared)
        print(f"written: {request.out}/report.md, report.png, report.csv, report.json")


def parse(arguments: list[str]) -> Request:
    """Read the command line. Raises UserError for a wrong word."""
    values: dict[str, str] = {}
    folders = []
    for word in arguments:
        key, equals, value = word.partition("=")
        if equals and key in KEYS:  # run directories, too, have = in their names
            if not value or key in values:
                raise UserError(f"'{word}': " + (f"write {key}=VALUE" if not value else f"give {key} once"))
            values[key] = value
        elif equals and "/" not in key and not Path(word).exists():
            hint = nearest(key, KEYS) or f"; allowed are {', '.join(f'{name}=...' for name in KEYS)}"
            raise UserError(f"'{word}': unknown argument{hint}")
        else:
            folders.append(Path(word))
    if not folders:
        raise UserError(
            "name at least one directory with runs, as python -m tiny_llm.report outputs/sweeps/NAME"
        )
    out = Path(values.get("out", folders[0]))
    if out.exists() and not out.is_dir() and "out" in values:
        raise UserError(f"out={out} is a file; name a directory")
    return Request(tuple(folders), values.get("compare"), values.get("baseline"), out)


def _against(report: Report, baseline: str | None) -> dict[int, Difference] | None:
    if baseline is None:
        return None
    bases = baselines(report, baseline)
    return {number: difference(report.groups[number - 1], base) for number, base in bases.items()}


def _show(report: Report, against: dict[int, Difference] | None, compared: Difference | None) -> None:
    from tiny_llm.analysis.report_console import show

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where ± cannot be written, it is a ?
    show(report, against, compared)


def _write(
    out: Path,
    report: Report,
    against: dict[int, Difference] | None,
    compared: Difference | None,
    command: str,
) -> None:
    from tiny_llm.analysis.report_files import write_csv, write_json, write_markdown
    from tiny_llm.analysis.sweep_plot import plot_report

    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / "report.csv", report, against)
        write_json(out / "report.json", report, against, compared, {"made": made, "command": command})
        plot_report(report, out / "report.png")
        write_markdown(out / "report.md", report, against, compared, command, "report.png")
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror}; name another with out=DIR") from None


if __name__ == "__main__":
    main(sys.argv[1:])
