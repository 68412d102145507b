"""Gossip between ranks: each sends its workers' parameter rows to those that hear them.

A mixing step's sparse peer lists say which rows cross ranks; a row goes once to each rank that needs it. Where all
share the mean of all, the rows' sum goes round instead (all-reduce). In flow an arena and a topology's step; out
flow the rows heard from elsewhere, or the sum, for `decentralized/mixing.py` to mix with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tiny_llm.decentralized.mixing import Peers, Sources, shares_mean
from tiny_llm.distributed.ranks import Ranks


@dataclass(frozen=True)
class Message:
    """A worker's row on its way from one rank to another."""

    worker: int
    sender: int
    receiver: int


def messages(peers: Peers, workers_a_rank: int) -> list[Message]:
    """Return the rows that cross ranks in a mixing step, in one order for all ranks."""
    wanted = {
        Message(j, j // workers_a_rank, i // workers_a_rank)
        for i, row in enumerate(peers)
        for j, _ in row
        if i // workers_a_rank != j // workers_a_rank
    }
    return sorted(wanted, key=lambda message: (message.worker, message.receiver))


def bytes_sent(peers: Peers, workers_a_rank: int, row_bytes: int) -> float:
    """Return the bytes that a rank sends in a mixing step, mean over ranks."""
    ranks = len(peers) // workers_a_rank
    if shares_mean(peers):
        return all_reduce_bytes(ranks, row_bytes)
    return len(messages(peers, workers_a_rank)) / ranks * row_bytes


def all_reduce_bytes(ranks: int, row_bytes: int) -> float:
    """Return the bytes that a rank sends to add a row up: 2 (R - 1) / R of it (Patarasuk & Yuan 2009, section 3)."""
    return 2 * (ranks - 1) / ranks * row_bytes


class Exchange:
    """One mixing step's communication, under way from construction until `finish`."""

    def __init__(self, ranks: Ranks, rows_nD: Tensor, peers: Peers) -> None:
        self._ranks = ranks
        self._sources = Sources(rows_nD, ranks.rank * len(rows_nD))
        self._works: list[dist.Work] = []
        if ranks.world == 1:
            return
        with ranks.talking():
            if shares_mean(peers):
                self._begin_sum(rows_nD)
            else:
                self._begin_messages(rows_nD, peers)

    def _begin_sum(self, rows_nD: Tensor) -> None:
        total_D = rows_nD.sum(0) if len(rows_nD) > 1 else rows_nD[0].clone()
        self._works.append(dist.all_reduce(total_D, async_op=True))
        self._sources.total_D = total_D

    def _begin_messages(self, rows_nD: Tensor, peers: Peers) -> None:
        first, operations = self._sources.first, []
        for message in messages(peers, len(rows_nD)):
            if message.sender == self._ranks.rank:
                row = rows_nD[message.worker - first]
                operations.append(dist.P2POp(dist.isend, row, message.receiver, tag=message.worker))
            elif message.receiver == self._ranks.rank:
                row = self._sources.heard[message.worker] = torch.empty_like(rows_nD[0])
                operations.append(dist.P2POp(dist.irecv, row, message.sender, tag=message.worker))
        if operations:
            self._works += dist.batch_isend_irecv(operations)

    def finish(self) -> Sources:
        """Wait until every row has come and gone, and return what to mix with."""
        with self._ranks.talking():
            for work in self._works:
                work.wait()
        return self._sources
