"""What a launcher asks of whoever does the work: a pool of processes on this machine, or SLURM.

A crew is handed points once and then asked, again and again, which of them it still has. How a point ended is
read from its directory, never from the crew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tiny_llm.sweeps.points import Point
from tiny_llm.sweeps.states import Label


@dataclass(frozen=True)
class LaunchSettings:
    """What every launcher understands."""

    on_failure: Literal["continue", "abort"]
    retry_failed: bool
    detach: bool


@dataclass(frozen=True)
class Alive:
    """A point that is not over: it waits or runs, and where."""

    label: Label
    place: str = ""


class Crew(Protocol):
    name: str
    longest_wait: float  # seconds between two looks

    @property
    def settings(self) -> LaunchSettings: ...

    def check(self, points: Sequence[Point]) -> None:
        """Raise UserError for what this crew cannot do, before anything is written."""

    def rehearses(self, points: Sequence[Point]) -> bool:
        """Show what would be submitted, if that is all that was asked for; return whether it was."""

    def in_flight(self, points: Sequence[Point]) -> set[str]:
        """Return the points that an earlier launch handed on and that are not over."""

    def submit(self, points: Sequence[Point], launch: int) -> None:
        """Take points over. Raises UserError."""

    def alive(self) -> Mapping[str, Alive]:
        """Return the points that are not over, by name."""

    def advance(self) -> None:
        """Start what there is room for."""

    def began(self, name: str) -> bool:
        """Whether this crew has started a point, so that one without a status is lost rather than waiting."""

    def abort(self) -> None:
        """Start nothing more and have what runs save and end."""

    def leave(self) -> str:
        """Do what must be done when the launcher itself is stopped, and say how its runs stand."""

    def log(self, name: str) -> Path | None:
        """Return the file that holds a point's last words."""

    def verdict(self, name: str) -> str:
        """Return what the crew knows about a point's end; empty when nothing."""
