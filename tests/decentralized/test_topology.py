"""What each topology promises, against the slow twin in topology_reference.py and the papers' numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from functools import reduce
from itertools import pairwise, permutations

import numpy as np
import pytest
from numpy.typing import NDArray
from topology_reference import reference_matrix

from tiny_llm.decentralized import topology as room
from tiny_llm.decentralized.base_k import base_k_rounds
from tiny_llm.decentralized.topology import (
    RANDOM_TOPOLOGY_NAMES,
    TOPOLOGY_NAMES,
    Topology,
    TopologyError,
    check_doubly_stochastic,
    degree,
    dense,
    equidyn,
    floats_sent,
    make_topology,
    spectral_gap,
    steps_to_exact_consensus,
)

Matrix = NDArray[np.float64]

SIZES = (*range(1, 19), 24, 27, 32)
POWERS_OF_TWO = (1, 2, 4, 8, 16, 32)
HYPERCUBES = ("hypercube", "one_peer_hypercube")
DYADIC = ("one_peer_ring", "one_peer_exponential", "disconnected", "one_peer_hypercube", "random_matching")


def sizes_of(name: str) -> tuple[int, ...]:
    return POWERS_OF_TWO if name in HYPERCUBES else SIZES


def product(topology: Topology, start: int, steps: int) -> Matrix:
    """W_{start+steps-1} ... W_start."""
    matrices = [topology.matrix(t) for t in range(start, start + steps)]
    return reduce(lambda earlier, later: later @ earlier, matrices, np.eye(topology.num_models))


def is_consensus(weights: Matrix) -> bool:
    return bool(np.abs(weights - 1 / len(weights)).max() < 1e-12)


# every topology


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_every_step_equals_the_slow_twin(name: str) -> None:
    for n in sizes_of(name):
        topology = make_topology(name, n, seed=n)
        for t in [*range(2 * (topology.period or 6) + 1), 1_000_003]:
            expected = reference_matrix(name, n, t, seed=n)
            np.testing.assert_allclose(topology.matrix(t), expected, rtol=0, atol=1e-15, err_msg=f"{n=} {t=}")


@pytest.mark.parametrize("name", DYADIC)
def test_weights_that_floats_can_hold_are_exact(name: str) -> None:
    for n in sizes_of(name):
        topology = make_topology(name, n)
        for t in range(8):
            assert set(np.unique(topology.matrix(t))) <= {0.0, 0.5, 1.0}


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_peers_are_the_positive_entries_of_the_matrix_in_order(name: str) -> None:
    for n in sizes_of(name):
        topology = make_topology(name, n, k=min(2, max(1, n - 1)))
        for t in range(7):
            weights = topology.matrix(t)
            assert weights.shape == (n, n)
            assert weights.dtype == np.float64
            expected = [[(j, weights[i, j]) for j in range(n) if weights[i, j] > 0] for i in range(n)]
            assert topology.peers(t) == expected
            assert all(i in [j for j, _ in row] for i, row in enumerate(expected)), (
                "a worker takes itself too"
            )


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_every_step_is_doubly_stochastic_at_every_size(name: str) -> None:
    for n in sizes_of(name):
        check_doubly_stochastic(make_topology(name, n))


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_period_is_the_shortest_after_which_the_matrices_repeat(name: str) -> None:
    for n in sizes_of(name):
        topology = make_topology(name, n)
        if topology.period is None:
            assert name in RANDOM_TOPOLOGY_NAMES
            continue
        steps = [topology.matrix(t) for t in range(3 * topology.period)]
        repeats = [
            shift
            for shift in range(1, topology.period + 1)
            if all(np.array_equal(steps[t], steps[t + shift]) for t in range(2 * topology.period))
        ]
        assert repeats == [topology.period], n


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_one_worker_keeps_itself_and_two_workers_average(name: str) -> None:
    two = np.eye(2) if name == "disconnected" else np.full((2, 2), 0.5)
    for t in range(5):
        assert np.array_equal(make_topology(name, 1).matrix(t), [[1.0]])
        assert np.array_equal(make_topology(name, 2).matrix(t), two)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_a_step_depends_on_no_earlier_call_and_on_no_edit_of_what_was_returned(name: str) -> None:
    topology = make_topology(name, 8, seed=5)
    forwards = [topology.matrix(t) for t in range(6)]
    room.one_period.cache_clear()
    room.random_step.cache_clear()
    for t in (5, 0, 3, 3, 1, 4, 2):
        fresh = make_topology(name, 8, seed=5)
        assert np.array_equal(fresh.matrix(t), forwards[t])
        fresh.matrix(t)[:] = 7
        fresh.peers(t)[0].clear()
        assert np.array_equal(fresh.matrix(t), forwards[t])


def test_equal_arguments_give_equal_topologies() -> None:
    assert make_topology("ring", 4) == make_topology("ring", 4)
    assert make_topology("base_k", 4, k=1) != make_topology("base_k", 4, k=2)


# one topology at a time


def test_offsets_are_incoming() -> None:
    ring = make_topology("one_peer_ring", 4)
    assert ring.peers(0) == [
        [(0, 0.5), (3, 0.5)],
        [(0, 0.5), (1, 0.5)],
        [(1, 0.5), (2, 0.5)],
        [(2, 0.5), (3, 0.5)],
    ]
    assert ring.peers(1) == [
        [(0, 0.5), (1, 0.5)],
        [(1, 0.5), (2, 0.5)],
        [(2, 0.5), (3, 0.5)],
        [(0, 0.5), (3, 0.5)],
    ]
    exponential = make_topology("one_peer_exponential", 5)
    assert [[j for j, _ in exponential.peers(t)[0] if j] for t in range(4)] == [[4], [3], [1], [4]]


@pytest.mark.parametrize("n", [3, 5, 7, 9, 15])
def test_one_peer_ring_is_doubly_stochastic_at_odd_sizes(n: int) -> None:
    ring = make_topology("one_peer_ring", n)
    for t in range(4):
        weights = ring.matrix(t)
        assert np.array_equal(weights.sum(axis=0), np.ones(n))
        assert np.array_equal(weights.sum(axis=1), np.ones(n))


@pytest.mark.parametrize("log_n", [1, 2, 3, 4, 5])
def test_one_peer_exponential_reaches_the_exact_mean_from_any_start(log_n: int) -> None:
    exponential = make_topology("one_peer_exponential", 2**log_n)
    for start in range(2 * log_n + 1):
        assert np.array_equal(product(exponential, start, log_n), np.full((2**log_n, 2**log_n), 0.5**log_n))
        assert not is_consensus(product(exponential, start, log_n - 1))


@pytest.mark.parametrize("n", [3, 6, 12])
def test_one_peer_exponential_mixes_with_a_permutation_where_n_is_no_power_of_two(n: int) -> None:
    exponential = make_topology("one_peer_exponential", n)
    for t in range(9):
        heard = 2 * exponential.matrix(t) - np.eye(n)
        assert set(np.unique(heard)) == {0.0, 1.0}
        assert np.array_equal(heard.sum(axis=0), np.ones(n)), "somebody is heard twice or never"
        assert np.array_equal(heard.sum(axis=1), np.ones(n)), "somebody hears two or none"
        assert np.trace(heard) == 0


@pytest.mark.parametrize(
    ("n", "neighbours"), [(2, 1), (4, 2), (6, 3), (8, 3), (9, 4), (10, 3), (12, 4), (16, 4)]
)
def test_torus_counts_each_neighbour_once_where_a_side_has_two(n: int, neighbours: int) -> None:
    weights = make_topology("torus", n).matrix(0)
    assert np.array_equal((weights > 0).sum(axis=1), np.full(n, neighbours + 1))
    assert np.array_equal(weights[weights > 0], np.full(n * (neighbours + 1), 1 / (neighbours + 1)))


def test_torus_is_as_square_as_the_size_allows() -> None:
    twelve = make_topology("torus", 12).peers(0)  # 3 rows of 4
    assert [j for j, _ in twelve[0]] == [0, 1, 3, 4, 8]
    assert [j for j, _ in twelve[6]] == [2, 5, 6, 7, 10]


@pytest.mark.parametrize("n", [3, 5, 7, 11, 13])
def test_torus_of_a_prime_size_is_the_ring(n: int) -> None:
    assert make_topology("torus", n).peers(0) == make_topology("ring", n).peers(0)


def test_star_has_metropolis_weights() -> None:
    rest = 1 - 0.25
    expected = [[0.25] * 4, [0.25, rest, 0, 0], [0.25, 0, rest, 0], [0.25, 0, 0, rest]]
    assert np.array_equal(make_topology("star", 4).matrix(0), expected)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_one_peer_hypercube_reaches_the_exact_mean_from_any_start(n: int) -> None:
    cube = make_topology("one_peer_hypercube", n)
    for start in range(5):
        assert np.array_equal(product(cube, start, n.bit_length() - 1), np.full((n, n), 1 / n))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
def test_random_matching_pairs_are_disjoint_and_only_an_odd_one_stays(n: int) -> None:
    matching = make_topology("random_matching", n, seed=1)
    for t in range(50):
        weights = matching.matrix(t)
        assert np.array_equal(weights, weights.T)
        stays = [i for i in range(n) if weights[i, i] == 1]
        pairs = [i for i in range(n) if weights[i, i] == 0.5 and (weights[i] == 0.5).sum() == 2]
        assert len(stays) == n % 2
        assert len(pairs) == n - n % 2


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
def test_equidyn_pairs_take_n_minus_1_parts_of_each_other_at_one_common_offset(n: int) -> None:
    equidyn = make_topology("equidyn", n, seed=1)
    for t in range(50):
        weights = equidyn.matrix(t)
        assert np.array_equal(weights, weights.T)
        pairs = [(i, j) for i in range(n) for j in range(i) if weights[i, j] > 0]
        assert len({i for pair in pairs for i in pair}) == 2 * len(pairs), "a worker is in two pairs"
        assert len({min(i - j, n - i + j) for i, j in pairs}) == 1, "the pairs of a step share their offset"
        for i, j in pairs:
            assert weights[i, j] == (n - 1) / n
            assert weights[i, i] == 1 / n
        alone = set(range(n)) - {i for pair in pairs for i in pair}
        assert all(weights[i, i] == 1 for i in alone)


@pytest.mark.parametrize("n", [3, 5, 8, 12])
def test_equidyn_leaves_nobody_alone_who_could_still_pair(n: int) -> None:
    for t in range(50):
        weights = make_topology("equidyn", n).matrix(t)
        i, j = next((i, j) for i in range(n) for j in range(n) if i != j and weights[i, j] > 0)
        alone = {i for i in range(n) if weights[i, i] == 1}
        assert not any((a + i - j) % n in alone for a in alone)


@pytest.mark.parametrize("name", RANDOM_TOPOLOGY_NAMES)
def test_draws_follow_seed_and_step_and_bring_every_pair_together(name: str) -> None:
    n = 7
    draws = [make_topology(name, n, seed=0).matrix(t) for t in range(200)]
    others = [make_topology(name, n, seed=1).matrix(t) for t in range(200)]
    assert sum(np.array_equal(a, b) for a, b in zip(draws, others, strict=True)) < 40
    assert sum(np.array_equal(a, b) for a, b in pairwise(draws)) < 40
    assert np.all(sum(draws) > 0)
    assert not all(np.array_equal(a, b) for a, b in zip(draws[1:], others, strict=False)), (
        "seed + t is no stream"
    )


# Base-(k+1)

LENGTHS = {
    1: {2: 1, 3: 3, 4: 2, 5: 5, 6: 4, 7: 5, 8: 3, 9: 7, 10: 6, 12: 5, 16: 4, 24: 6, 32: 5},
    2: {3: 1, 5: 3, 6: 2, 7: 4, 12: 3},
}


@pytest.mark.parametrize("k", [1, 2])
def test_base_k_has_the_lengths_of_the_paper(k: int) -> None:
    assert {n: make_topology("base_k", n, k).period for n in LENGTHS[k]} == LENGTHS[k]


def test_base_k_of_three_and_five_workers_edge_by_edge() -> None:
    half = Fraction(1, 2)
    assert base_k_rounds(3, 1) == [{(0, 1): half}, {(1, 2): Fraction(2, 3)}, {(0, 1): half}]
    pairs, crosses = {(0, 1): half, (2, 3): half}, {(0, 2): half, (1, 3): half}
    assert base_k_rounds(5, 1) == [pairs, crosses, {(0, 1): half, (3, 4): Fraction(4, 5)}, pairs, crosses]


def test_base_k_of_three_workers_as_matrices() -> None:
    three = make_topology("base_k", 3)
    first: list[list[float]] = [[1 / 2, 1 / 2, 0], [1 / 2, 1 / 2, 0], [0, 0, 1]]
    second: list[list[float]] = [[1, 0, 0], [0, 1 / 3, 2 / 3], [0, 2 / 3, 1 / 3]]
    for t, expected in enumerate([first, second, first, first, second, first]):
        assert np.array_equal(three.matrix(t), expected)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_k_equals_the_slow_twin_round_by_round(k: int) -> None:
    for n in range(k + 1, 33):
        topology = make_topology("base_k", n, k)
        for t in range(topology.period or 0):
            expected = reference_matrix("base_k", n, t, k)
            np.testing.assert_allclose(topology.matrix(t), expected, rtol=0, atol=1e-15, err_msg=f"{n=} {t=}")


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_k_is_exact_at_the_end_of_a_period_and_hears_at_most_k(k: int) -> None:
    for n in range(max(2, k + 1), 33):
        topology = make_topology("base_k", n, k)
        assert topology.period is not None
        assert is_consensus(product(topology, 0, topology.period)), n
        assert is_consensus(product(topology, 3 * topology.period, topology.period)), n
        assert degree(topology) <= k
        for t in range(topology.period):
            weights = topology.matrix(t)
            assert np.array_equal(weights, weights.T)
            assert np.abs(weights.sum(axis=0) - 1).max() < 1e-15


def test_base_k_is_not_exact_from_inside_a_period() -> None:
    assert not is_consensus(product(make_topology("base_k", 3), 1, 3))
    assert not is_consensus(product(make_topology("base_k", 5), 2, 5))


# refusals


@pytest.mark.parametrize("name", HYPERCUBES)
@pytest.mark.parametrize(("n", "below", "above"), [(3, 2, 4), (6, 4, 8), (12, 8, 16)])
def test_hypercubes_refuse_other_sizes_and_name_the_nearest(
    name: str, n: int, below: int, above: int
) -> None:
    with pytest.raises(
        TopologyError, match=f"'{name}'.*power of two, got {n}; nearest are {below} and {above}"
    ):
        make_topology(name, n)


def test_an_unknown_name_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(
        TopologyError, match=r"'rnig' is unknown; nearest is 'ring', all are complete, .*equidyn"
    ):
        make_topology("rnig", 4)


@pytest.mark.parametrize(("n", "k", "nearest"), [(6, 0, 1), (6, 6, 5), (2, 2, 1), (1, 2, 1), (6, -3, 1)])
def test_base_k_refuses_a_degree_out_of_bounds(n: int, k: int, nearest: int) -> None:
    with pytest.raises(
        TopologyError, match=f"num_models={n} needs k in 1..{max(1, n - 1)}, got {k}; .*k={nearest}$"
    ):
        make_topology("base_k", n, k)


def test_no_workers_and_negative_seeds_are_refused() -> None:
    with pytest.raises(TopologyError, match="num_models >= 1, got 0"):
        make_topology("ring", 0)
    with pytest.raises(TopologyError, match="seed >= 0, got -1"):
        make_topology("equidyn", 4, seed=-1)


def test_refusals_are_one_line_and_value_errors() -> None:
    with pytest.raises(ValueError) as refusal:
        make_topology("hypercube", 6)
    assert "\n" not in str(refusal.value)


class Planted(Topology):
    """A topology with one wrong matrix, at step 2."""

    wrong: tuple[tuple[float, ...], ...] = ()

    def matrix(self, t: int) -> Matrix:
        return np.array(self.wrong) if t == 2 else super().matrix(t)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (((0.5, 0.5), (0.5, 0.4)), "step 2 is not doubly stochastic: row 1 sums to 0.9"),
        (((0.5, 0.5), (0.4, 0.6)), "step 2 is not doubly stochastic: column 1 sums to 1.1"),
        (((1.5, -0.5), (-0.5, 1.5)), "step 2 has the weight -0.5"),
        (((math.nan, 0.5), (0.5, 0.5)), "step 2 has the weight nan"),
    ],
)
def test_a_matrix_that_is_not_doubly_stochastic_is_found(
    wrong: tuple[tuple[float, ...], ...], message: str
) -> None:
    planted = Planted("random_matching", 2)
    object.__setattr__(planted, "wrong", wrong)
    check_doubly_stochastic(planted, steps=2)
    with pytest.raises(TopologyError, match=message):
        check_doubly_stochastic(planted)


# what a topology promises


def test_degree_is_the_most_that_anyone_hears() -> None:
    expected = {
        "complete": 7,
        "one_peer_ring": 1,
        "disconnected": 0,
        "ring": 2,
        "static_exponential": 3,
        "star": 7,
    }
    assert {name: degree(make_topology(name, 8)) for name in expected} == expected


def test_floats_sent_are_the_mean_over_workers_and_period() -> None:
    assert floats_sent(make_topology("complete", 8)) == 7
    assert floats_sent(make_topology("star", 8)) == 14 / 8
    assert floats_sent(make_topology("base_k", 3)) == 2 / 3
    assert floats_sent(make_topology("random_matching", 5)) == 4 / 5
    assert floats_sent(make_topology("disconnected", 5)) == 0


def test_steps_to_exact_consensus() -> None:
    expected = {"complete": 1, "one_peer_exponential": 3, "one_peer_hypercube": 3, "base_k": 3}
    assert {name: steps_to_exact_consensus(make_topology(name, 8)) for name in TOPOLOGY_NAMES} == {
        name: expected.get(name) for name in TOPOLOGY_NAMES
    }
    assert steps_to_exact_consensus(make_topology("ring", 3)) == 1
    assert steps_to_exact_consensus(make_topology("base_k", 9)) == 7
    assert steps_to_exact_consensus(make_topology("equidyn", 2)) == 1
    assert steps_to_exact_consensus(make_topology("disconnected", 1)) == 0


def test_spectral_gap_equals_the_closed_forms() -> None:
    n = 8
    expected = {
        "complete": 1,
        "disconnected": 0,
        "ring": 1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3,
        "one_peer_ring": 1 - math.cos(math.pi / n) ** 2,
        "one_peer_exponential": 1,
        "hypercube": 1 - 2 / 4,
        "star": 1 / n,
        "base_k": 1,
    }
    gaps = {name: spectral_gap(make_topology(name, n)) for name in expected}
    assert gaps == pytest.approx(expected, abs=1e-12)


def gap_over(steps: list[Matrix]) -> float:
    """The gap of a random topology, of all its equally likely steps."""
    square = sum(w.T @ w for w in steps) / len(steps)
    return 1 - float(np.linalg.norm(square - 1 / len(square), ord=2)) ** 0.5


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_spectral_gap_of_random_matching_is_that_of_all_matchings(n: int) -> None:
    steps = []
    for order in permutations(range(n)):
        w = np.eye(n)
        for i, j in zip(order[0::2], order[1::2], strict=False):
            w[[i, j], :] = (w[i] + w[j]) / 2
        steps.append(w)
    assert spectral_gap(make_topology("random_matching", n)) == pytest.approx(gap_over(steps), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 12])
def test_spectral_gap_of_equidyn_is_that_of_all_its_steps(n: int) -> None:
    steps = {
        step.tobytes(): step for t in range(40 * n * n) for step in [make_topology("equidyn", n).matrix(t)]
    }
    pairs = [dense(equidyn(n, offset, start)) for offset in range(1, n) for start in range(n)]
    assert set(steps) == {step.tobytes() for step in pairs}
    assert spectral_gap(make_topology("equidyn", n)) == pytest.approx(gap_over(pairs), abs=1e-12)


def test_the_room_needs_no_torch() -> None:
    code = "import sys, tiny_llm.decentralized.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
