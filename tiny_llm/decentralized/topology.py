"""Topologies: who hears whom, and with which weight, at each mixing step.

A topology is a pure function from a mixing step t to a mixing matrix W, doubly stochastic and N x N: after
the step worker i holds sum_j W[i, j] x_j. Row i says what worker i takes; offsets are incoming, so with
offset o worker i hears worker (i - o) mod N. Nothing here remembers an earlier call: the step alone is the
phase, and a resumed run mixes as an uninterrupted one would.

`make_topology` checks name, size, k and seed and returns a `Topology`; ask it for `matrix(t)` (dense, for
tests and analysis) or `peers(t)` (sparse, for mixing). `one_period` reads like the table of topologies, one
case a name. The functions at the end measure what a topology promises: degree, traffic, steps to exact
consensus, spectral gap. J is the matrix with 1/N everywhere, exact consensus.

This room needs no torch; the Base-(k+1) construction is next door in `base_k.py`.

Sources:
- exponential graphs: Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep
  Training", arXiv:2110.13363
- Metropolis weights: Xiao, Boyd and Lall 2005, "A Scheme for Robust Distributed Sensor Fusion Based on
  Average Consensus"
- random matchings and mean-square contraction: Boyd et al. 2006, "Randomized Gossip Algorithms"
- EquiDyn: Song et al. 2022, "Communication-Efficient Topologies for Decentralized Learning with O(1)
  Consensus Rate", arXiv:2210.07881, the one-peer undirected OU-EquiDyn
- Base-(k+1): Takezawa et al. 2023, arXiv:2305.11420
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiny_llm.config.errors import UserError
from tiny_llm.decentralized.base_k import Round, base_k_rounds

Matrix = NDArray[np.float64]

SparseMatrix = tuple[tuple[tuple[int, float], ...], ...]
"""For each row the (column, weight) of its positive entries, by ascending column."""

RANDOM_TOPOLOGY_NAMES = ("random_matching", "equidyn")
TOPOLOGY_NAMES = (
    "complete",
    "one_peer_ring",
    "one_peer_exponential",
    "disconnected",
    "ring",
    "static_exponential",
    "torus",
    "star",
    "hypercube",
    "one_peer_hypercube",
    "random_matching",
    "base_k",
    "equidyn",
)

SAMPLED_STEPS = 64
"""How many steps stand for a topology that never repeats."""

TOLERANCE = 1e-12
"""The largest rounding error of a sum or product of weights that still counts as exact."""


class TopologyError(UserError):
    """A topology that does not exist or not at this size; the message names the value and what is allowed."""


@dataclass(frozen=True)
class Topology:
    """One topology at one size. Build it with `make_topology`, which checks the values.

    `k` is read by base_k only, `seed` by random_matching and equidyn only.
    """

    name: str
    num_models: int
    k: int = 1
    seed: int = 0

    @property
    def period(self) -> int | None:
        """The number of mixing steps after which W repeats; None where each step is a fresh draw."""
        if self.name in RANDOM_TOPOLOGY_NAMES:
            return None
        return len(one_period(self.name, self.num_models, self.k))

    def peers(self, t: int) -> list[list[tuple[int, float]]]:
        """Return for each worker the (peer, weight) it takes at step t, itself too, by ascending peer."""
        return [list(row) for row in self._rows(t)]

    def matrix(self, t: int) -> Matrix:
        """Return W at mixing step t, [N, N] float64; row i is what worker i takes."""
        return dense(self.peers(t))

    def _rows(self, t: int) -> SparseMatrix:
        if self.name in RANDOM_TOPOLOGY_NAMES:
            return random_step(self.name, self.num_models, self.seed, t)
        steps = one_period(self.name, self.num_models, self.k)
        return steps[t % len(steps)]


def make_topology(name: str, num_models: int, k: int = 1, seed: int = 0) -> Topology:
    """Return the topology `name` of `num_models` workers.

    `k` is the largest degree of base_k, `seed` fixes the draws of the random topologies; others ignore them.
    Raises TopologyError for an unknown name, a size the topology does not allow, and k or seed out of bounds.
    """
    if name not in TOPOLOGY_NAMES:
        nearest = difflib.get_close_matches(name, TOPOLOGY_NAMES, n=1, cutoff=0.0)[0]
        allowed = ", ".join(TOPOLOGY_NAMES)
        raise TopologyError(f"topology '{name}' is unknown; nearest is '{nearest}', all are {allowed}")
    if num_models < 1:
        raise TopologyError(f"topology '{name}' needs num_models >= 1, got {num_models}; 1 mixes nothing")
    if name in ("hypercube", "one_peer_hypercube") and num_models & (num_models - 1):
        below = 1 << (num_models.bit_length() - 1)
        raise TopologyError(
            f"topology '{name}' needs num_models to be a power of two, got {num_models}; "
            f"nearest are {below} and {2 * below} (base_k allows any size)"
        )
    largest_k = max(1, num_models - 1)
    if name == "base_k" and not 1 <= k <= largest_k:
        raise TopologyError(
            f"topology 'base_k' with num_models={num_models} needs k in 1..{largest_k}, got {k}; "
            f"nearest is k={min(max(k, 1), largest_k)}"
        )
    if seed < 0:
        raise TopologyError(f"topology '{name}' needs seed >= 0, got {seed}; 0 is the default")
    return Topology(name, num_models, k, seed)


@lru_cache(maxsize=256)
def one_period(name: str, num_models: int, k: int) -> tuple[SparseMatrix, ...]:
    """Return W at steps 0, 1, ... of one period of a topology that repeats."""
    n = num_models
    ring = {1 % n, -1 % n} - {0}
    powers = [2**j for j in range((n - 1).bit_length())]  # all below n; ceil(log2 n) of them
    match name:
        case "complete":
            steps = [hear_offsets(n, range(1, n))]
        case "disconnected":
            steps = [hear_offsets(n, [])]
        case "one_peer_ring":
            steps = [hear_offsets(n, [offset]) for offset in sorted(ring)]
        case "ring":
            steps = [hear_offsets(n, ring)]
        case "one_peer_exponential":
            steps = [hear_offsets(n, [offset]) for offset in powers]
        case "static_exponential":
            steps = [hear_offsets(n, powers)]
        case "torus":
            steps = [exchange(n, metropolis(n, torus_pairs(n)))]
        case "star":
            steps = [exchange(n, metropolis(n, [(0, leaf) for leaf in range(1, n)]))]
        case "hypercube":
            cube = [(i, i ^ bit) for bit in powers for i in range(n) if i < i ^ bit]
            steps = [exchange(n, metropolis(n, cube))]
        case "one_peer_hypercube":
            pairings = [[(i, i ^ bit) for i in range(n) if i < i ^ bit] for bit in powers]
            steps = [exchange(n, dict.fromkeys(pairs, Fraction(1, 2))) for pairs in pairings]
        case "base_k":
            steps = [exchange(n, edges) for edges in base_k_rounds(n, k)]
        case _:
            raise AssertionError(f"{name} has no period")
    return tuple(steps) or (hear_offsets(n, []),)


@lru_cache(maxsize=256)
def random_step(name: str, num_models: int, seed: int, t: int) -> SparseMatrix:
    """Return W of a random topology at step t, drawn from (seed, t) alone."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, t]))
    if name == "random_matching":
        order = rng.permutation(num_models).tolist()
        pairs = list(zip(order[0::2], order[1::2], strict=False))  # an odd one stays
        return exchange(num_models, dict.fromkeys(pairs, Fraction(1, 2)))
    assert name == "equidyn", f"{name} is not drawn"
    if num_models == 1:
        return exchange(1, {})
    return equidyn(num_models, offset=int(rng.integers(1, num_models)), start=int(rng.integers(num_models)))


def dense(rows: Sequence[Sequence[tuple[int, float]]]) -> Matrix:
    """Return [N, N] float64 of each row's (column, weight) pairs."""
    weights = np.zeros((len(rows), len(rows)))
    for worker, row in enumerate(rows):
        for peer, weight in row:
            weights[worker, peer] = weight
    return weights


def hear_offsets(num_models: int, offsets: Iterable[int]) -> SparseMatrix:
    """Each worker i averages itself and each worker (i - offset) mod N uniformly; offsets are distinct."""
    heard = [0, *offsets]
    weight = 1 / len(heard)
    return tuple(
        tuple((peer, weight) for peer in sorted((worker - offset) % num_models for offset in heard))
        for worker in range(num_models)
    )


def exchange(num_models: int, edges: Round) -> SparseMatrix:
    """Both ends of an edge take its weight of each other; a worker keeps what its edges leave of 1."""
    rows = [{worker: Fraction(1)} for worker in range(num_models)]
    for (i, j), weight in edges.items():
        rows[i][j] = rows[j][i] = weight
        rows[i][i] -= weight
        rows[j][j] -= weight
    return tuple(tuple((peer, float(row[peer])) for peer in sorted(row) if row[peer]) for row in rows)


def metropolis(num_models: int, pairs: list[tuple[int, int]]) -> Round:
    """Return the Metropolis weights 1 / (1 + max(degree_i, degree_j)) of undirected, distinct pairs."""
    degrees = [0] * num_models
    for i, j in pairs:
        degrees[i] += 1
        degrees[j] += 1
    return {(i, j): Fraction(1, 1 + max(degrees[i], degrees[j])) for i, j in pairs}


def torus_pairs(num_models: int) -> list[tuple[int, int]]:
    """Return the neighbours of a grid with wrap, as square as N allows; a prime N gives one row, a ring.

    Worker i stands in row i // columns. A side of two workers wraps onto itself and joins them once.
    """
    rows = max(r for r in range(1, math.isqrt(num_models) + 1) if num_models % r == 0)
    columns = num_models // rows
    pairs = set()
    for worker in range(num_models):
        row, column = divmod(worker, columns)
        right = row * columns + (column + 1) % columns
        down = (row + 1) % rows * columns + column
        pairs |= {(min(worker, other), max(worker, other)) for other in (right, down) if other != worker}
    return sorted(pairs)


def equidyn(num_models: int, offset: int, start: int) -> SparseMatrix:
    """Going round from `start`, pair i with i + offset if both are unpaired; pairs take (N - 1) / N of each other."""
    paired: set[int] = set()
    pairs = []
    for step in range(num_models):
        i = (start + step) % num_models
        j = (i + offset) % num_models
        if i not in paired and j not in paired:
            paired |= {i, j}
            pairs.append((i, j))
    return exchange(num_models, dict.fromkeys(pairs, Fraction(num_models - 1, num_models)))


def check_doubly_stochastic(topology: Topology, steps: int | None = None) -> None:
    """Raise TopologyError unless W is non-negative, with rows and columns summing to 1, at each step.

    `steps` steps are checked: by default one period, or SAMPLED_STEPS of a topology that never repeats.
    """
    for t in range(observed_steps(topology) if steps is None else steps):
        weights = topology.matrix(t)
        sums = {"row": weights.sum(axis=1), "column": weights.sum(axis=0)}
        where = f"topology '{topology.name}' with num_models={topology.num_models} at step {t}"
        if not np.all(weights >= 0):
            raise TopologyError(f"{where} has the weight {weights.min()}; all must be >= 0")
        for line, total in sums.items():
            worst = int(np.argmax(np.abs(total - 1)))
            if not abs(total[worst] - 1) <= TOLERANCE:
                raise TopologyError(
                    f"{where} is not doubly stochastic: {line} {worst} sums to {total[worst]}, not 1"
                )


def observed_steps(topology: Topology) -> int:
    """Return how many steps describe the topology: its period, or SAMPLED_STEPS where it has none."""
    return topology.period or SAMPLED_STEPS


def degree(topology: Topology) -> int:
    """Return the most neighbours that any worker hears in one step."""
    return max(len(row) - 1 for t in range(observed_steps(topology)) for row in topology.peers(t))


def floats_sent(topology: Topology) -> float:
    """Return the floats that a worker sends in an update, in units of its D parameters.

    Each hearer counts as one message of D floats. Mean over workers and over a period (SAMPLED_STEPS steps
    of a random topology).
    """
    steps = observed_steps(topology)
    messages = sum(len(row) - 1 for t in range(steps) for row in topology.peers(t))
    return messages / (steps * topology.num_models)


def steps_to_exact_consensus(topology: Topology) -> int | None:
    """Return the least m for which W_{m-1} ... W_0 is J, or None where the topology promises none.

    One period is enough to look at: its product is J or another normal matrix, no power of which is J. A
    random topology may be lucky but promises only what every draw does, so one step of it is enough. One
    worker needs none: 0.
    """
    product = np.eye(topology.num_models)
    for m in range((topology.period or 1) + 1):
        if np.abs(product - 1 / topology.num_models).max() <= TOLERANCE:
            return m
        product = topology.matrix(m) @ product
    return None


def spectral_gap(topology: Topology) -> float:
    """Return 1 - rho, with rho the largest singular value of W_{P-1} ... W_0 - J over one period of P steps.

    rho is the most that a period can leave of the consensus error ||x - Jx||: gap 1 is exact consensus, gap 0
    leaves some error whole. For a random topology rho is the mean-square contraction of a single step: rho^2
    is the largest eigenvalue of E[W^T W] - J (Boyd et al. 2006). (The product of many random steps says less:
    where N is a power of two it soon hits J by luck.)
    """
    if topology.period is None:
        return 1 - math.sqrt(_mean_square_contraction(topology))
    product = np.eye(topology.num_models)
    for t in range(topology.period):
        product = topology.matrix(t) @ product
    return max(0.0, 1 - float(np.linalg.norm(product - 1 / topology.num_models, ord=2)))


def _mean_square_contraction(topology: Topology) -> float:
    """Return the largest eigenvalue of E[W^T W] - J of a random topology."""
    n = topology.num_models
    if n == 1:
        return 0.0
    if topology.name == "random_matching":  # W is a projection, and any two meet as often as any others
        return 1 - n / (2 * (n - 1 + n % 2))
    squares = np.zeros((n, n))
    for offset in range(1, n):
        weights = dense(equidyn(n, offset, start=0))
        squares += weights.T @ weights / (n - 1)
    shifted = [np.roll(row, -i) for i, row in enumerate(squares)]  # a random start makes the mean circulant
    return max(0.0, float(np.fft.fft(np.mean(shifted, axis=0)).real[1:].max()))
