"""One gossip step over the rows of an arena, in place: x <- W'x with W' = gamma W + (1 - gamma) I.

n workers of this process  N workers in all  D elements of a row  C columns of a block
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tiny_llm.decentralized.arena import blocks

Peers = list[list[tuple[int, float]]]
"""For each worker i the pairs (j, W_ij), i itself among them, in ascending j."""


@dataclass
class Sources:
    """What a mixing step reads: this process's rows, workers `first` and on, and what others sent.

    heard: rows [D] of workers elsewhere. total_D: the sum of all workers' rows, where all hear all.
    """

    rows_nD: Tensor
    first: int = 0
    heard: dict[int, Tensor] = field(default_factory=dict)
    total_D: Tensor | None = None

    def row(self, worker: int) -> Tensor:
        heard = self.heard.get(worker)
        return self.rows_nD[worker - self.first] if heard is None else heard


class Mixing:
    """A mixing step, ready to be applied to one block of columns after another."""

    def __init__(self, sources: Sources, peers: Peers, gamma: float = 1.0) -> None:
        self.sources = sources
        self.gamma = gamma
        self.num_models = len(peers)
        own = range(sources.first, sources.first + len(sources.rows_nD))
        self._terms = None if shares_mean(peers) else [_weakened(peers[i], i, gamma) for i in own]

    def apply_(self, columns: slice) -> None:
        """Mix some columns of this process's rows.

        Each row adds its terms by ascending worker, so its result does not depend on which process holds whom;
        but where all share a mean, they mix with that.
        """
        if self.num_models == 1 or self.gamma == 0.0:
            return
        if self._terms is None:
            self._approach_mean_(columns)
            return
        heard = {j: self.sources.row(j)[columns] for terms in self._terms for j, _ in terms}
        mixed = []
        for (first, weight), *others in self._terms:
            row_C = heard[first] * weight
            for j, weight in others:
                row_C.add_(heard[j], alpha=weight)
            mixed.append(row_C)
        for own, row_C in enumerate(mixed, self.sources.first):
            self.sources.row(own)[columns] = row_C

    def _approach_mean_(self, columns: slice) -> None:
        rows_nC, total_D = self.sources.rows_nD[:, columns], self.sources.total_D
        mean_C = rows_nC.sum(0) if total_D is None else total_D[columns].clone()
        mean_C.div_(self.num_models)
        if self.gamma == 1.0:
            rows_nC.copy_(mean_C)
        else:
            rows_nC.mul_(1 - self.gamma).add_(mean_C, alpha=self.gamma)


def mix_(arena_ND: Tensor, peers: Peers, gamma: float = 1.0) -> None:
    """Mix the rows of an arena that holds all workers, without a second arena."""
    mixing = Mixing(Sources(arena_ND), peers, gamma)
    for columns in blocks(arena_ND):
        mixing.apply_(columns)


def shares_mean(peers: Peers) -> bool:
    """Whether a step gives the mean of all to all, by one sum.

    Two workers need no sum: each hears the other's row, which is as many bytes between ranks and one pass less.
    """
    return len(peers) > 2 and all(
        len(row) == len(peers) and len({weight for _, weight in row}) == 1 for row in peers
    )


def _weakened(row: list[tuple[int, float]], i: int, gamma: float) -> list[tuple[int, float]]:
    """Return row i of gamma W + (1 - gamma) I."""
    return [(j, gamma * weight + (1 - gamma) * (j == i)) for j, weight in row]
