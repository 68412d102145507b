"""One launch of a sweep: from composed command lines to an exit code.

    points, all validated -> lock -> sweep.json -> what is left to do -> token caches -> crew -> watch -> end

The same for every launcher. Launching again is how a sweep is resumed: complete points are skipped, points
that are still queued are watched, interrupted and lost ones go on from their newest state, failed ones are
left alone unless `retry_failed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from tiny_llm.config.compose import Composed, override_key
from tiny_llm.config.schema import DataConfig
from tiny_llm.sweeps.board import Board, Row, count_labels, tell_end
from tiny_llm.sweeps.crew import Crew
from tiny_llm.sweeps.points import Point, make_points
from tiny_llm.sweeps.source import read_source
from tiny_llm.sweeps.states import label, read_standing
from tiny_llm.sweeps.sweep import Sweep

SHORTEST_WAIT, LONGEST_WAIT, GROWTH = (
    0.25,
    15.0,
    1.3,
)  # seconds between two looks; longer while nothing changes


class Stopped(BaseException):
    """The launcher itself was asked to stop. No Exception, so that nothing on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def launch(composed: Sequence[Composed], directory: Path, make_crew: Callable[[Sweep], Crew]) -> None:
    """Run every point that is left. Ends with SystemExit(1) unless all are complete. Raises UserError."""
    sweep = Sweep(directory)
    points = make_points(composed, directory, sweep.names())
    if any(one.values["dry_run"] for one in composed):
        print(json.dumps([_summary(point) for point in points], indent=2))
        return
    crew = make_crew(sweep)
    crew.check(points)
    with sweep.locked(), stoppable():
        points = make_points(
            composed, directory, sweep.names()
        )  # another launch may have named some meanwhile
        if crew.rehearses([point for point in points if is_left(point, crew.settings.retry_failed)]):
            return
        with _leaving(sweep, crew):
            _start(sweep, points, crew)
            if crew.settings.detach:
                _detach(sweep, points, crew)
            else:
                _watch_to_the_end(sweep, points, crew)


def _summary(point: Point) -> dict[str, object]:
    return {"name": point.name, "overrides": list(point.overrides), **point.plan.summary()}


def _start(sweep: Sweep, points: Sequence[Point], crew: Crew) -> None:
    """Hand what is left to the crew, after preparing the caches it needs."""
    in_flight = crew.in_flight(points)
    sweep.add_points(points)
    rest = [point for point in points if point.name not in in_flight]
    left = [point for point in rest if is_left(point, crew.settings.retry_failed)]
    done = sum(read_standing(point.directory).complete for point in rest)
    print(
        f"sweep {sweep.path}: {len(points)} points, {done} done, {len(in_flight)} still in the queue, "
        f"{len(left)} to start, {len(rest) - done - len(left)} failed before",
        flush=True,
    )
    if left:
        prepare_caches(left)
        settings = dataclasses.asdict(crew.settings)
        number = sweep.add_launch(again(sweep), {"launcher": crew.name, **settings}, read_source())
        crew.submit(left, number)


def is_left(point: Point, retry_failed: bool) -> bool:
    """Whether a point that nobody works on is to be started."""
    status = read_standing(point.directory).status
    return status != "complete" and (retry_failed or status != "failed")


def prepare_caches(points: Sequence[Point]) -> None:
    """Make sure of every token cache once, large enough for all points that read it. Raises UserError."""
    from tiny_llm.data.loader import check_capacity
    from tiny_llm.data.prepare import ensure_cache

    largest: dict[DataConfig, Point] = {}
    for point in sorted(points, key=lambda point: point.plan.targets_needed):
        largest[point.config.data] = point
    caches = {}
    for data, point in largest.items():
        with _as_if_typed(point.overrides):
            caches[data] = ensure_cache(data, point.plan.targets_needed, print)
    for point in points:
        data, length = point.config.data, point.config.model.context_length
        with _as_if_typed(point.overrides):
            check_capacity(caches[data], data, length, point.plan.tokens)


@contextlib.contextmanager
def _as_if_typed(overrides: Sequence[str]) -> Iterator[None]:
    """Have messages that repeat the command line repeat one point's, since no other door takes swept values."""
    typed, sys.argv = sys.argv, [sys.argv[0], *overrides]
    try:
        yield
    finally:
        sys.argv = typed


def _watch_to_the_end(sweep: Sweep, points: Sequence[Point], crew: Crew) -> None:
    rows = watch(sweep, points, crew)
    tell_end(rows, crew)
    if all(row.label == "done" for row in rows):
        print(f"tables and pictures: python -m tiny_llm.report {sweep.path}")
        return
    if any(row.label == "failed" for row in rows):
        print("failed points are tried again with hydra.launcher.retry_failed=true", file=sys.stderr)
    print(f"go on with: {again(sweep)}", file=sys.stderr)
    raise SystemExit(1)


def watch(sweep: Sweep, points: Sequence[Point], crew: Crew) -> list[Row]:
    """Show the points until the crew has none left, and return how each stands. Heeds on_failure."""
    wait, before, aborted = SHORTEST_WAIT, "", False
    failed_before = {row.point.name for row in look(points, crew) if row.label == "failed"}
    with Board(sweep.name) as board:
        while crew.alive():
            rows = look(points, crew)
            board.show(rows)
            fresh = any(
                row.label in ("failed", "lost") and row.point.name not in failed_before for row in rows
            )
            if crew.settings.on_failure == "abort" and fresh and not aborted:
                print("on_failure=abort: the other runs save and end")
                crew.abort()
                aborted = True
            crew.advance()
            now = count_labels(rows)
            wait = SHORTEST_WAIT if now != before else wait * GROWTH
            before = now
            time.sleep(min(wait, crew.longest_wait))
        rows = look(points, crew)
        board.show(rows)
    return rows


def look(points: Sequence[Point], crew: Crew) -> list[Row]:
    """Return how every point stands now."""
    alive = crew.alive()
    rows = []
    for point in points:
        here, standing = alive.get(point.name), read_standing(point.directory)
        named = label(standing, here.label if here else None, crew.began(point.name))
        rows.append(Row(point, named, standing, here.place if here else ""))
    return rows


def _detach(sweep: Sweep, points: Sequence[Point], crew: Crew) -> None:
    """Return at once; a pool stays behind as a process of its own, with what it would show in a file."""
    if crew.name == "slurm":
        print(f"submitted; to watch: {again(sweep)}")
        return
    log = sweep.jobs_folder / "launcher.log"
    sys.stdout.flush()
    if pid := os.fork():
        print(f"detached as process {pid}, which writes {log}; kill {pid} has its runs save and end")
        return
    os.setsid()
    with open(log, "ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _watch_to_the_end(sweep, points, crew)


def again(sweep: Sweep) -> str:
    """Return the command that goes on with this sweep: the one that was typed, and the sweep's name."""
    typed = sys.argv[1:]
    if not any(override_key(text) == "sweep_name" for text in typed):
        typed = [*typed, f"sweep_name={sweep.name}"]
    return f"python -m tiny_llm.train {shlex.join(typed)}"


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into Stopped."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    before = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _leaving(sweep: Sweep, crew: Crew) -> Iterator[None]:
    """Whatever ends the launcher, leave the crew in order; say how to go on after a signal."""
    try:
        yield
    except Stopped as stopped:
        print(f"\n{stopped}: stopping", file=sys.stderr, flush=True)
        try:
            print(f"{crew.leave()}\ngo on with: {again(sweep)}", file=sys.stderr)
        except Stopped:
            print("killed", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    except Exception:
        crew.leave()
        raise
