"""Run directories, read for a report: which there are, what each was told to do, how far it came, what it found.

In go folders; out come `RunRecord`s. Only files are read and torch is never loaded, so a report can be made any
time: while runs write, after they died, years later on another machine. What cannot be read becomes a record
that says so; nothing here raises for a run's sake. A run counts (`status == "complete"`) only if status.json
says complete and result.json holds a finite final loss.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_llm.config.errors import ConfigError, UserError
from tiny_llm.config.parse import parse_config
from tiny_llm.config.saved import NOT_THE_RECIPE, flatten, recipe_identity

# What is measured of a complete run, the most important first.
METRICS = ("final_validation_loss", "tokens_per_second", "hours", "relative_consensus_error")
LOSS, SPEED, HOURS, CONSENSUS = METRICS

SEED = "runtime.seed"
# What a run directory begins with: the trainer's config, or the config that a sweep has handed to a job.
BEGINNINGS = frozenset({"resolved.yaml", "composed.yaml"})

# Keys that say nothing where decentralized.scheme is off: their values there are defaults, not choices.
UNUSED_WHEN_OFF = ("topology.", "adaptive_consensus.", "decentralized.mix_every")


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory tells it.

    settings: the leaves of its config that decide its numbers, the seed apart; none before it has begun.
    metrics: those of METRICS that it has; empty unless it is complete.
    curve: validation loss (nats, the subset of each epoch's end) by training tokens so far.
    update, loss: of its newest row; updates: how many it is to make.
    reason: why it does not count, and what else is known of it.
    """

    directory: Path
    status: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    update: int | None = None
    updates: int | None = None
    loss: float | None = None
    parameters: int | None = None
    data: str | None = None
    reason: str = ""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return every run directory in or below the folders, each once. Raises UserError where there is none."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if folder.is_file():
            raise UserError(f"{folder} is a file; name the directory of a run or a sweep, as {folder.parent}")
        if not folder.is_dir():
            raise UserError(f"{folder} does not exist; name the directory of a run, a sweep or many runs")
        here = list(_walk(folder))
        if not here:
            raise UserError(
                f"{folder} holds no run: there is no resolved.yaml in it or below; "
                "name the directory of a run, or of a sweep, as outputs/sweeps/NAME"
            )
        for directory in here:
            found.setdefault(directory.resolve(), directory)
    return list(found.values())


def _walk(folder: Path) -> Iterator[Path]:
    """Give the run directories, sorted; a sweep names its points, begun or not; hidden folders are skipped."""
    for place, inside, names in os.walk(folder):
        if not BEGINNINGS.isdisjoint(names):
            inside.clear()  # nothing of ours lies below a run
            yield Path(place)
        if "sweep.json" in names:
            yield from (Path(place) / name for name in _point_names(Path(place) / "sweep.json"))
        inside[:] = sorted(name for name in inside if not name.startswith("."))


def _point_names(path: Path) -> list[str]:
    try:
        return sorted(_read_json(path).get("points", {}))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: {_one_line(error)}; move it away to see the runs alone") from None


def read_run(directory: Path) -> RunRecord:
    """Return what a run directory says; a file that cannot be read makes it a `damaged` run."""
    status = "damaged"
    try:
        settings, recipe = _read_settings(directory / "resolved.yaml")
    except Exception as error:  # OmegaConf lets YAML's many errors through
        return RunRecord(directory, status, reason=f"resolved.yaml: {_one_line(error)}")
    seed = settings.pop(SEED, None)
    try:
        return _read_progress(directory, settings, recipe, seed)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return RunRecord(directory, status, settings, seed, reason=_one_line(error))


def _read_settings(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the leaves that decide numbers, and the identity of the recipe where this version can read it.

    There are none for a point of a sweep that has not begun.
    """
    from omegaconf import OmegaConf

    if not path.exists():
        return {}, None
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    recipe = None
    with contextlib.suppress(ConfigError):
        recipe = recipe_identity(parse_config(values))
    leaves = {key: value for key, value in flatten(values).items() if key not in NOT_THE_RECIPE}
    if leaves.get("decentralized.scheme") == "off":
        leaves = {key: value for key, value in leaves.items() if not key.startswith(UNUSED_WHEN_OFF)}
    return leaves, recipe


def _read_progress(directory: Path, settings: Mapping[str, Any], recipe: str | None, seed: Any) -> RunRecord:
    # The trainer writes rows, then result.json, then status.json: read backwards, a finished run is whole.
    stated = _read_json(directory / "status.json")
    result = _read_json(directory / "result.json")
    curve, train, newest = _read_metrics(directory / "metrics.jsonl")
    status, reason = _judge(directory, settings, stated, result)
    ran = result.get("identity", {}).get("recipe", recipe)
    if status == "complete" and recipe not in (None, ran):
        status, reason = (
            "damaged",
            f"resolved.yaml is not the one of result.json (recipe {recipe[:12]}, {ran[:12]})",
        )
    return RunRecord(
        directory,
        status,
        settings,
        seed,
        metrics=_measure(result, train) if status == "complete" else {},
        curve=curve,
        update=newest.get("update"),
        updates=stated.get("updates"),
        loss=_finite(newest.get("loss")),
        parameters=result.get("parameters"),
        data=result.get("identity", {}).get("data"),
        reason=reason,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON mapping, empty where there is no such file. Raises ValueError for a damaged one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is damaged: it holds no mapping")
    return value


def _read_metrics(path: Path) -> tuple[dict[int, float], dict[str, Any], dict[str, Any]]:
    """Return the validation curve, the last train row and the newest row; a torn last line is no row.

    Only the rows that are wanted are parsed: a long run's many train rows cost next to nothing.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        validation = [json.loads(line) for line in lines if b'"validation"' in line]
        train: dict[str, Any] = next((json.loads(line) for line in reversed(lines) if b'"train"' in line), {})
        newest = json.loads(lines[-1]) if lines else {}
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None
    curve = {row["tokens"]: row["loss"] for row in validation if _finite(row.get("loss")) is not None}
    return curve, train, newest


def _judge(
    directory: Path, settings: Mapping[str, Any], stated: dict[str, Any], result: dict[str, Any]
) -> tuple[str, str]:
    """Return a run's status and why it does not count; the reason of a complete one is empty."""
    status = str(stated.get("status", "unknown"))
    if status == "complete":
        if not settings:
            return "damaged", "status.json says complete, but resolved.yaml is missing or empty"
        if not result:
            return "damaged", "status.json says complete, but result.json is missing"
        if _finite(result.get(LOSS)) is None:
            return "damaged", f"result.json has {LOSS}={result.get(LOSS)}"
        return status, ""
    if status == "failed":
        return status, _one_line(stated.get("error", "no error was recorded"))
    if status == "interrupted":
        return status, f"by {stated.get('signal', 'a signal')}"
    if status == "running":
        if _is_gone(stated):
            return "lost", f"its process {stated['pid']} has ended without a word"
        return status, f"on {stated.get('host', 'an unknown host')}, {_last_written(directory)}"
    if stated or settings:
        return status, "" if stated else "there is no status.json"
    return "waiting", "it has not begun"


def _is_gone(stated: dict[str, Any]) -> bool:
    """Whether a run that says it is running was this machine's, and its process is no more."""
    pid = stated.get("pid")
    if stated.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # asks only whether it exists
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _last_written(directory: Path) -> str:
    written = max(
        (
            path.stat().st_mtime
            for name in ("metrics.jsonl", "status.json")
            if (path := directory / name).exists()
        ),
        default=0.0,
    )
    minutes = max(0.0, time.time() - written) / 60
    return "last written " + (f"{minutes:.0f} min ago" if minutes < 120 else f"{minutes / 60:.0f} h ago")


def _measure(result: dict[str, Any], train: dict[str, Any]) -> dict[str, float]:
    seconds = _finite(result.get("seconds"))
    values = {
        LOSS: result.get(LOSS),
        SPEED: result.get(SPEED),
        HOURS: None if seconds is None else seconds / 3600,
        CONSENSUS: train.get(CONSENSUS),
    }
    return {name: number for name, value in values.items() if (number := _finite(value)) is not None}


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
