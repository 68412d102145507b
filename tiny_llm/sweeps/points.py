"""The points of a sweep: one validated config each, a name to read and an identity to find it again by.

In flow the composed command lines of every point and the sweep's directory; out flow `Point`s, all of them
or none: the first bad one raises before anything is written. A point is its recipe. Two launches that compose
the same recipe mean the same point, whatever they call it and however it is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiny_llm.config.compose import Composed, override_key
from tiny_llm.config.errors import ConfigError, UserError
from tiny_llm.config.plan import Plan, make_plan
from tiny_llm.config.saved import flatten, plain, recipe_identity
from tiny_llm.config.schema import Config
from tiny_llm.decentralized.topology import make_topology

RECOVERY_MINUTES = 30.0  # under a launcher a run may be preempted any time
IDENTITY_LETTERS = 8
LONGEST_NAME = 100  # letters before the identity; file systems allow 255 bytes

OF_THE_SWEEP = {"sweep_name", "dry_run"}  # keys that say nothing about a point
# Keys that a launcher decides itself, with what to write instead.
DECIDED_BY_THE_SWEEP = {
    "output_dir": "a sweep names each run's directory itself; name the sweep with sweep_name=",
    "resume": "a sweep goes on when the same command is run again with its sweep_name=",
}


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `name` is also the name of its directory."""

    name: str
    overrides: tuple[str, ...]
    identity: str
    plan: Plan

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def directory(self) -> Path:
        return Path(self.config.output_dir)


def make_points(composed: Sequence[Composed], sweep: Path, known: Mapping[str, str]) -> list[Point]:
    """Return the point of every composed command line. Raises ConfigError naming the first bad one.

    known: the names that the sweep has already given, by identity.
    """
    swept = swept_keys([one.overrides for one in composed])
    points: dict[str, Point] = {}
    for number, one in enumerate(composed, 1):
        try:
            point = _point(one, sweep, known, swept)
            if twin := points.get(point.identity):
                raise ConfigError(_sameness(twin, point))
        except UserError as error:
            if len(composed) == 1:
                raise
            shown = " ".join(text for text in one.overrides if override_key(text) in swept)
            raise ConfigError(f"point {number} of {len(composed)} ({shown}): {error}") from None
        points[point.identity] = point
    return list(points.values())


def swept_keys(overrides: Sequence[Sequence[str]]) -> set[str]:
    """Return the keys whose values differ between points; all but the sweep's own for a single point."""
    if len(overrides) == 1:
        return {override_key(text) for text in overrides[0]} - OF_THE_SWEEP
    everywhere = set(overrides[0]).intersection(*map(set, overrides[1:]))
    return {override_key(text) for one in overrides for text in one if text not in everywhere}


def _point(composed: Composed, sweep: Path, known: Mapping[str, str], swept: set[str]) -> Point:
    _refuse_decided(composed, swept)
    config = composed.config()
    device = config.runtime.device
    if device.startswith("cuda:"):
        raise ConfigError(
            f"runtime.device={device}: the launcher gives each run its device; use cuda or auto"
        )
    minutes = config.training.recovery_minutes or RECOVERY_MINUTES
    config = replace(config, training=replace(config.training, recovery_minutes=minutes), dry_run=False)
    identity = recipe_identity(config)
    name = known.get(identity) or point_name(composed.overrides, swept, identity)
    plan = make_plan(replace(config, output_dir=str(sweep / name)))
    make_topology(num_models=plan.num_models, **vars(config.topology))
    overrides = tuple(text for text in composed.overrides if override_key(text) not in OF_THE_SWEEP)
    return Point(name, overrides, identity, plan)


def _refuse_decided(composed: Composed, swept: set[str]) -> None:
    for text in composed.overrides:
        key = override_key(text)
        if key in DECIDED_BY_THE_SWEEP:
            raise ConfigError(f"{key} would be ignored: {DECIDED_BY_THE_SWEEP[key]}")
        if key.partition(".")[0].partition("/")[0] == "hydra":
            raise ConfigError(
                f"{text} would be ignored: settings of the launcher and of Hydra cannot be swept"
            )
    if "sweep_name" in swept:
        raise ConfigError("sweep_name would be ignored: one sweep has one name")


def _sameness(twin: Point, point: Point) -> str:
    ours, theirs = flatten(plain(point.config)), flatten(plain(twin.config))
    differing = [key for key in ours if ours[key] != theirs.get(key) and key != "output_dir"]
    what = f"differs from another point in {', '.join(differing)} alone, which decides no number"
    return f"{what if differing else 'is the same as another point'}; leave it out"


def point_name(overrides: Sequence[str], swept: set[str], identity: str) -> str:
    """Return a name such as 'topology-ring+seed-43+1a2b3c4d', safe in shells, paths and Hydra overrides."""
    readable = []
    for text in overrides:
        if override_key(text) in swept:
            value = re.sub(r"(?<=\de)\+", "", text.partition("=")[2])  # 1e+30 is not 1e-30
            value = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-.")
            readable.append(f"{override_key(text).rpartition('.')[2]}-{value}")
    while len("+".join(readable)) > LONGEST_NAME:
        del readable[0]  # what was typed last is what was varied last
    return "+".join([*readable, identity[:IDENTITY_LETTERS]])
