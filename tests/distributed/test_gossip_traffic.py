"""What a mixing step sends between ranks is what its matrix says, each row once to each rank that needs it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tiny_llm.decentralized.topology import TOPOLOGY_NAMES, Topology, floats_sent, make_topology
from tiny_llm.distributed.gossip import Message, bytes_sent, messages

ROW_BYTES = 4 * 1000
PLACEMENTS = [(workers, ranks) for workers, ranks in product((2, 4, 8), (1, 2, 4, 8)) if ranks <= workers]


def some_topologies(num_models: int) -> list[Topology]:
    degrees = [("base_k", k) for k in range(2, min(num_models, 4))]
    return [
        make_topology(name, num_models, k, 5) for name, k in [*((n, 1) for n in TOPOLOGY_NAMES), *degrees]
    ]


def steps(topology: Topology) -> range:
    return range(topology.period or 64)


def crossings(topology: Topology, t: int, ranks: int) -> set[tuple[int, int, int]]:
    """Each (worker, its rank, a rank that hears it), entry by entry of the dense matrix."""
    matrix, share = topology.matrix(t), topology.num_models // ranks
    found = set()
    for i in range(topology.num_models):
        for j in range(topology.num_models):
            if matrix[i, j] != 0 and i // share != j // share:
                found.add((j, j // share, i // share))
    return found


def averages_all(topology: Topology, t: int) -> bool:
    return bool(np.all(topology.matrix(t) == 1 / topology.num_models))


@pytest.mark.parametrize(("workers", "ranks"), PLACEMENTS)
def test_every_row_that_crosses_ranks_goes_once_to_each_rank_that_hears_it(workers: int, ranks: int) -> None:
    for topology in some_topologies(workers):
        for t in steps(topology):
            sent = messages(topology.peers(t), workers // ranks)
            assert len(sent) == len(set(sent))
            assert {(m.worker, m.sender, m.receiver) for m in sent} == crossings(topology, t, ranks)


def test_all_ranks_post_their_messages_in_one_order() -> None:
    """Two rows between the same two ranks must not overtake each other: senders and receivers sort alike."""
    sent = messages(make_topology("static_exponential", 8).peers(0), 2)
    assert sent == sorted(sent, key=lambda message: (message.worker, message.receiver))
    assert sent[0] == Message(0, 0, 1)


@pytest.mark.parametrize(("workers", "ranks"), PLACEMENTS)
def test_a_rank_sends_the_bytes_of_its_messages_or_of_an_all_reduce(workers: int, ranks: int) -> None:
    for topology in some_topologies(workers):
        for t in steps(topology):
            sent = bytes_sent(topology.peers(t), workers // ranks, ROW_BYTES)
            if averages_all(topology, t):
                assert sent == pytest.approx(2 * (ranks - 1) / ranks * ROW_BYTES)
            else:
                assert sent == pytest.approx(len(crossings(topology, t, ranks)) / ranks * ROW_BYTES)


@pytest.mark.parametrize("workers", [4, 8])
def test_one_worker_a_rank_sends_on_average_what_its_topology_promises(workers: int) -> None:
    for topology in some_topologies(workers):
        if any(averages_all(topology, t) for t in steps(topology)):
            continue
        mean = np.mean([bytes_sent(topology.peers(t), 1, ROW_BYTES) for t in steps(topology)])
        assert mean == pytest.approx(floats_sent(topology) * ROW_BYTES)


def test_an_all_reduce_of_the_mean_sends_less_than_a_message_to_everyone() -> None:
    topology = make_topology("complete", 8)
    assert floats_sent(topology) == 7
    assert bytes_sent(topology.peers(0), 1, ROW_BYTES) == 2 * 7 / 8 * ROW_BYTES


def test_alone_nothing_is_sent() -> None:
    for topology in some_topologies(4):
        assert bytes_sent(topology.peers(0), 4, ROW_BYTES) == 0
