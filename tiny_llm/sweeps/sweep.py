"""A sweep's directory: what it holds and who may write it.

    sweep.json        every point with its overrides and identity, every launch with its source, every array
    POINT/            one run directory a point; composed.yaml in it is what its job runs, whatever is edited later
    .submitit/        job scripts, pickles and logs; diffs of the source
    .lock             held by the one launcher that works on the sweep

sweep.json is rewritten whole at each step. An array is noted before it is submitted and once more with its job
ids, so that a launcher that is killed in between leaves no jobs that the next one does not find.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_llm import files
from tiny_llm.config.errors import UserError
from tiny_llm.config.saved import to_yaml
from tiny_llm.sweeps.points import Point
from tiny_llm.sweeps.source import Source

COMPOSED = "composed.yaml"
FORMAT = 1


@dataclass
class JobArray:
    """Points that were submitted together. `token` marks the array in the queue until its `jobs` are known."""

    token: str
    points: list[str]
    jobs: list[str] | None = None


class Sweep:
    """One sweep on disk. Read it freely; write inside `locked()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: dict[str, dict[str, Any]] = {}
        self.launches: list[dict[str, Any]] = []
        self.arrays: list[JobArray] = []
        self.read()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def jobs_folder(self) -> Path:
        return self.path / ".submitit"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second launcher out for as long as this one lives."""
        try:
            self.jobs_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; choose another sweep_name") from None
        busy = f"another launcher works on {self.path}; wait for it, stop it, or choose another sweep_name"
        with files.exclusive(self.path / ".lock", busy):
            self.read()
            yield

    def read(self) -> None:
        """Take over what sweep.json says. Raises UserError when it is damaged or of another version."""
        path = self.path / "sweep.json"
        if not path.exists():
            return
        saved = files.read_json(path)
        if saved.get("format") != FORMAT:
            raise UserError(f"{path} has format {saved.get('format')}; this version reads {FORMAT}")
        self.points, self.launches = saved["points"], saved["launches"]
        self.arrays = [JobArray(**array) for array in saved["arrays"]]

    def write(self) -> None:
        files.write_json(
            self.path / "sweep.json",
            {
                "format": FORMAT,
                "name": self.name,
                "points": self.points,
                "launches": self.launches,
                "arrays": [dataclasses.asdict(array) for array in self.arrays],
            },
        )

    def names(self) -> dict[str, str]:
        """Return the names that were given, by identity."""
        return {entry["identity"]: name for name, entry in self.points.items()}

    def add_launch(self, command: str, launcher: Mapping[str, Any], source: Source) -> int:
        """Note a launch with its source and return its number; the diff goes into a file of its own."""
        number = len(self.launches)
        diff = self.jobs_folder / f"source-{number}.diff"
        if source.diff:
            files.write_text(diff, source.diff)
        self.launches.append(
            {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "host": socket.gethostname(),
                "command": command,
                "launcher": dict(launcher),
                "source": {
                    "commit": source.commit,
                    "dirty": bool(source.diff) if source.commit else None,
                    "diff": str(diff.relative_to(self.path)) if source.diff else None,
                },
            }
        )
        return number

    def add_points(self, points: Sequence[Point]) -> None:
        """Note points that are new here."""
        for point in points:
            entry = {"overrides": list(point.overrides), "identity": point.identity, "launch": None}
            self.points.setdefault(point.name, entry)
        self.write()

    def entrust(self, points: Sequence[Point], launch: int) -> None:
        """Store the config that each point's next job runs, and which launch started it."""
        for point in points:
            point.directory.mkdir(parents=True, exist_ok=True)
            files.write_text(point.directory / COMPOSED, to_yaml(point.config))
            self.points[point.name]["launch"] = launch
        self.write()

    def job_of(self, name: str) -> str | None:
        """Return the id of the newest SLURM job of a point."""
        for array in reversed(self.arrays):
            if name in array.points and array.jobs:
                return array.jobs[array.points.index(name)]
        return None
