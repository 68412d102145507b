"""One gossip step over the rows of an arena, in place: x <- W'x with W' = gamma W + (1 - gamma) I.

n workers of this process  N workers in all  D elements of a row  C columns of a block
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiny_llm.decentralized.arena import blocks

Terms = list[tuple[int, float]]
Peers = list[Terms]
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
        self._terms: dict[int, Terms] | None = None
        if not shares_mean(peers):
            own = range(sources.first, sources.first + len(sources.rows_nD))
            orders = [{i: _weakened(peers[i], i, gamma) for i in order} for order in (own, own[::-1])]
            self._terms = min(orders, key=lambda terms: len(_read_later(terms)))
            self._kept = _read_later(self._terms)
        self._room = sources.rows_nD.new_empty(0, 0)

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
        rows = {j: self.sources.row(j)[columns] for terms in self._terms.values() for j, _ in terms}
        sum_C, *copies = self._buffers(len(next(iter(rows.values()))))
        heard = rows | {j: copy.copy_(rows[j]) for j, copy in zip(self._kept, copies, strict=True)}
        for i, terms in self._terms.items():
            _combine_(rows[i], i, terms, heard, sum_C)

    def _buffers(self, width: int) -> tuple[Tensor, ...]:
        """Return room for a sum and for the kept rows: fresh memory for each block costs as much as mixing it."""
        if self._room.shape[1] < width:
            self._room = self.sources.rows_nD.new_empty(1 + len(self._kept), width)
        return self._room[:, :width].unbind()

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


def _read_later(terms: dict[int, Terms]) -> list[int]:
    """Return the rows that one further on still reads, where rows are overwritten in the order of `terms`."""
    order = list(terms)
    return [j for place, j in enumerate(order) if any(j in dict(terms[i]) for i in order[place + 1 :])]


def _combine_(own_C: Tensor, i: int, terms: Terms, heard: dict[int, Tensor], sum_C: Tensor) -> None:
    """Make worker i's row the mean of its terms: each moves it by its share of the weights so far.

    In sum_C up to the row's own term, from there in place. Weights like 1/3, which do not add up to 1 in fp32,
    would let the workers' mean grow step by step; shares do not, and equal rows stay what they are.
    """
    (first, total), *others = terms
    mean_C = heard[first]
    for j, weight in others:
        total += weight
        mean_C = torch.lerp(mean_C, heard[j], weight / total, out=own_C if j >= i else sum_C)


def _weakened(row: Terms, i: int, gamma: float) -> Terms:
    """Return row i of gamma W + (1 - gamma) I."""
    return [(j, gamma * weight + (1 - gamma) * (j == i)) for j, weight in row]
