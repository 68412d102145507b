"""Arenas: one contiguous [N, D_padded] tensor each for parameters, gradients and both AdamW moments.

A parameter is a view at the same offset in every arena. Entries start at multiples of 64 elements and padding
stays zero. What decays comes first, so a worker's decayed part is one contiguous run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tiny_llm.config.memory import padded
from tiny_llm.config.parameters import ParameterSpec

BLOCK = 2**18  # columns at once on a CPU: what mixing leaves in its caches, AdamW finds there


@dataclass(frozen=True)
class Entry:
    """Where one parameter lies in a worker's row, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    padded_numel: int
    decays: bool


@dataclass(frozen=True)
class Layout:
    """The entries of a row, in order and without gaps but for padding."""

    entries: tuple[Entry, ...]

    @staticmethod
    def of(specs: tuple[ParameterSpec, ...]) -> Layout:
        entries, start = [], 0
        for spec in sorted(specs, key=lambda spec: not spec.decays):
            entries.append(Entry(spec.name, spec.shape, start, spec.numel, padded(spec.numel), spec.decays))
            start += padded(spec.numel)
        return Layout(tuple(entries))

    @property
    def size(self) -> int:
        """D_padded, the elements of a row."""
        last = self.entries[-1]
        return last.start + last.padded_numel

    @property
    def decayed(self) -> int:
        """The elements at the front of a row that weight decay applies to."""
        return sum(entry.padded_numel for entry in self.entries if entry.decays)

    def views(self, arena: Tensor) -> dict[str, Tensor]:
        """Return each parameter as a view: [N, *shape] of an arena [N, D_padded], [*shape] of a row."""
        leading = arena.shape[:-1]
        return {
            entry.name: arena[..., entry.start : entry.start + entry.numel].view(*leading, *entry.shape)
            for entry in self.entries
        }

    def plain(self) -> list[dict[str, Any]]:
        """Return the layout as plain data, as checkpoints keep it."""
        return [{**vars(entry), "shape": list(entry.shape)} for entry in self.entries]


def blocks(arena_ND: Tensor, start: int = 0, stop: int | None = None) -> Iterator[slice]:
    """Yield an arena's columns from start to stop: on a CPU in blocks, on other devices all at once."""
    stop = arena_ND.shape[1] if stop is None else stop
    size = BLOCK if arena_ND.device.type == "cpu" else max(1, stop - start)
    for left in range(start, stop, size):
        yield slice(left, min(left + size, stop))
