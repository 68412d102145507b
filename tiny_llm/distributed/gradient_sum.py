"""Data parallel: the ranks' gradients, added up in buckets while the backward pass goes on.

A bucket is a run of neighbours in the gradient arena. As soon as the last micro-batch's backward pass has put all
of a bucket's gradients into the arena, its sum over ranks starts; what is left of it is waited for at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tiny_llm.decentralized.arena import Layout
from tiny_llm.distributed.ranks import Ranks

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel


def buckets(layout: Layout, element_size: int, limit: int = BUCKET_BYTES) -> list[tuple[slice, list[str]]]:
    """Return the columns of each bucket and the parameters in it; a larger parameter is a bucket of its own."""
    found: list[tuple[slice, list[str]]] = []
    for entry in layout.entries:
        stop = entry.start + entry.padded_numel
        if found and (stop - found[-1][0].start) * element_size <= limit:
            columns, names = found.pop()
            found.append((slice(columns.start, stop), [*names, entry.name]))
        else:
            found.append((slice(entry.start, stop), [entry.name]))
    return found


class GradientSum:
    """Sums the gradient arena of one model over ranks. `begin` before the last backward pass, `finish` after it."""

    def __init__(
        self, ranks: Ranks, layout: Layout, gradients_1D: Tensor, parameters: Mapping[str, Tensor]
    ) -> None:
        self._ranks = ranks
        self._gradients_D = gradients_1D[0]
        self._buckets = buckets(layout, gradients_1D.element_size())
        self._works: list[dist.Work] = []
        self._waiting: list[int] | None = None  # gradients that each bucket still waits for
        for index, (_, names) in enumerate(self._buckets):
            for name in names:
                parameters[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, index=index: self._arrived(index)
                )

    def begin(self) -> None:
        """Let the next backward pass set off each bucket that it completes."""
        self._works = []
        self._waiting = [len(names) for _, names in self._buckets]

    def finish(self) -> None:
        """Wait for all sums."""
        with self._ranks.talking():
            for work in self._works:
                work.wait()
        assert self._waiting is not None
        assert not any(self._waiting), "a parameter had no gradient"
        self._waiting = None

    def _arrived(self, index: int) -> None:
        if self._waiting is None:
            return
        self._waiting[index] -= 1
        if not self._waiting[index]:
            columns, _ = self._buckets[index]
            with self._ranks.talking(), torch.no_grad():
                self._works.append(dist.all_reduce(self._gradients_D[columns], async_op=True))
