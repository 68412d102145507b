"""One gossip step is a matrix product, whatever the block size; and what it must leave alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from topology_reference import reference_matrix
from torch import Tensor

from tiny_llm.decentralized.consensus import consensus_error
from tiny_llm.decentralized.mixing import mix_, shares_mean
from tiny_llm.decentralized.topology import TOPOLOGY_NAMES, make_topology

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, base_config, one_thread, random_packed  # noqa: F401

SIZES = (1, 2, 3, 4, 5, 8)
POWERS_OF_TWO_ONLY = ("hypercube", "one_peer_hypercube")


def sizes_of(name: str) -> list[int]:
    return [n for n in SIZES if name not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0]


def random_arena(workers: int, columns: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(workers, columns, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("gamma", [1.0, 0.3])
@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_a_step_is_the_product_with_the_mixing_matrix(name: str, gamma: float) -> None:
    for n in sizes_of(name):
        topology = make_topology(name, n, seed=5)
        for t in range(4):
            w = gamma * reference_matrix(name, n, t, seed=5) + (1 - gamma) * np.eye(n)
            for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 3e-7)):
                arena = random_arena(n, 97, dtype)
                expected = torch.from_numpy(w @ arena.double().numpy())
                mix_(arena, topology.peers(t), gamma)
                assert arena.dtype == dtype
                assert (arena.double() - expected).abs().max() < 8 * tolerance, (n, t)


@pytest.mark.parametrize("columns", [1, 6, 7, 8, 13, 14, 15, 100])
def test_mixing_in_blocks_gives_the_bits_of_mixing_at_once(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = make_topology("ring", 5).peers(0)
    whole, blocks = random_arena(5, columns), random_arena(5, columns)
    mix_(whole, peers, 0.7)
    monkeypatch.setattr("tiny_llm.decentralized.arena.BLOCK", 7)
    mix_(blocks, peers, 0.7)
    assert torch.equal(blocks, whole)
    w = 0.7 * reference_matrix("ring", 5, 0) + 0.3 * np.eye(5)
    expected = torch.from_numpy(w @ random_arena(5, columns).numpy())
    torch.testing.assert_close(blocks, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("gamma", [1.0, 0.3])
@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_a_row_adds_what_was_there_before_the_step_by_ascending_worker(name: str, gamma: float) -> None:
    """To the bit, though rows are overwritten while others still want them."""
    for n in sizes_of(name)[1:]:
        topology = make_topology(name, n, seed=3)
        for t in range(4):
            peers = topology.peers(t)
            if shares_mean(peers):
                continue
            arena, before = (random_arena(n, 70, torch.float32) for _ in range(2))
            mix_(arena, peers, gamma)
            for i, row in enumerate(peers):
                weights = [(j, gamma * weight + (1 - gamma) * (j == i)) for j, weight in row]
                expected, total = before[weights[0][0]], weights[0][1]
                for j, weight in weights[1:]:
                    total += weight
                    expected = expected.lerp(before[j], weight / total)
                assert torch.equal(arena[i], expected), (n, t, i)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_equal_rows_keep_their_bits(name: str) -> None:
    """Three times 1/3 is more than 1 in fp32: rows that grow by that much a step drift over 100,000 of them."""
    for n in sizes_of(name)[1:]:
        topology = make_topology(name, n, seed=3)
        arena = random_arena(1, 200, torch.float32).repeat(n, 1)
        before = arena.clone()
        for t in range(8):
            if not shares_mean(topology.peers(t)):
                mix_(arena, topology.peers(t), (1.0, 0.7)[t % 2])
        assert torch.equal(arena, before), n


def test_a_step_leaves_no_trace_beyond_its_rows() -> None:
    """Mixing a part of a larger tensor touches nothing around it."""
    large = random_arena(6, 50)
    before = large.clone()
    mix_(large[1:4, 10:30], make_topology("complete", 3).peers(0))
    inside = torch.zeros(6, 50, dtype=torch.bool)
    inside[1:4, 10:30] = True
    assert torch.equal(large[~inside], before[~inside])
    mean = before[1:4, 10:30].mean(0)
    torch.testing.assert_close(large[1:4, 10:30], mean.expand(3, -1), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_gamma_zero_and_a_single_worker_change_no_bit(name: str) -> None:
    arena = random_arena(4, 33, torch.float32)
    arena[0, 0] = torch.nan  # which 0 * nan would spread
    before = arena.clone()
    mix_(arena, make_topology(name, 4).peers(1), 0.0)
    assert torch.equal(arena.nan_to_num(9.0), before.nan_to_num(9.0))
    single = random_arena(1, 33, torch.float32)
    mix_(single, make_topology(name, 1).peers(1), 1.0)
    assert torch.equal(single, random_arena(1, 33, torch.float32))


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_the_mean_over_workers_moves_by_rounding_only(name: str) -> None:
    for n in sizes_of(name):
        for gamma in (1.0, 0.37):
            topology = make_topology(name, n, seed=1)
            arena = random_arena(n, 40)
            mean, largest = arena.mean(0), arena.abs().max()
            for t in range(60):
                mix_(arena, topology.peers(t), gamma)
            assert (arena.mean(0) - mean).abs().max() < 60 * 2.3e-16 * largest, (n, gamma)


@pytest.mark.parametrize("name", [name for name in TOPOLOGY_NAMES if name != "disconnected"])
def test_workers_come_together(name: str) -> None:
    """So that the tests of what stays are not passed by doing nothing."""
    for n in sizes_of(name)[1:]:
        topology = make_topology(name, n, seed=1)
        arena = random_arena(n, 40)
        before = consensus_error(arena)[0]
        for t in range(40):
            mix_(arena, topology.peers(t))
        assert consensus_error(arena)[0] < 1e-2 * before, n


def test_the_model_mixes_its_parameters_by_the_step_and_nothing_else() -> None:
    model = random_packed(base_config().model, 4, torch.float64)
    model.gradient_storage.fill_(3.0)
    for step, gamma in ((0, 1.0), (1, 0.4), (2, 1.0)):
        w = gamma * reference_matrix("one_peer_exponential", 4, step) + (1 - gamma) * np.eye(4)
        expected = torch.from_numpy(w @ model.parameter_storage.numpy())
        model.mix_(make_topology("one_peer_exponential", 4), step, gamma=gamma)
        assert apart(model.parameter_storage, expected) < 1e-14
    assert (model.gradient_storage == 3.0).all()


# consensus error


def looped_consensus_error(arena: Tensor) -> tuple[float, float]:
    rows = arena.double().tolist()
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    error = sum(sum((x - m) ** 2 for x, m in zip(row, mean, strict=True)) for row in rows) / len(rows)
    return error, error / sum(m * m for m in mean)


@pytest.mark.parametrize("block", [1, 5, 2**17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_consensus_error_equals_the_loop(
    dtype: torch.dtype, tolerance: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiny_llm.decentralized.consensus.PART", block)
    for workers in (1, 2, 5):
        arena = random_arena(workers, 83, dtype) + 0.5
        assert consensus_error(arena) == pytest.approx(
            looped_consensus_error(arena), rel=tolerance, abs=1e-14
        )


def test_equal_workers_have_no_consensus_error_and_zeros_divide_by_nothing() -> None:
    for workers in (1, 2, 3, 4, 5, 6, 7, 8):
        equal = random_arena(1, 5000, torch.float32).expand(workers, -1)
        assert consensus_error(equal) == (0.0, 0.0), workers
    assert consensus_error(torch.zeros(3, 10)) == (0.0, 0.0)
