"""The slow, obvious twin of `tiny_llm.decentralized.topology`: every W as a dense matrix, entry by entry.

It follows the wording of the definitions (table, paper, appendix) with explicit loops and plain floats and
shares no code with the room it checks. `reference_matrix` is the way in.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Edges = list[tuple[int, int, float]]


def reference_matrix(name: str, n: int, t: int, k: int = 1, seed: int = 0) -> Matrix:
    """W of topology `name` with n workers at mixing step t."""
    if n == 1:
        return np.ones((1, 1))
    if name == "base_k":
        rounds = reference_base_k(n, k)
        return from_edges(n, rounds[t % len(rounds)])
    if name in ("random_matching", "equidyn"):
        return reference_draw(name, n, t, seed)
    if name in ("torus", "star", "hypercube"):
        return metropolis_from_adjacency(adjacency(name, n))
    return reference_by_rule(name, n, t)


def reference_by_rule(name: str, n: int, t: int) -> Matrix:
    """The topologies that the table gives as a formula for row i."""
    weights = np.zeros((n, n))
    log2_ceil = math.ceil(math.log2(n))
    for i in range(n):
        if name == "complete":
            for j in range(n):
                weights[i, j] = 1 / n
        elif name == "disconnected":
            weights[i, i] = 1
        elif name == "one_peer_ring":
            weights[i, i] = 0.5
            weights[i, (i - (1 if t % 2 == 0 else -1)) % n] = 0.5
        elif name == "one_peer_exponential":
            weights[i, i] = 0.5
            weights[i, (i - 2 ** (t % log2_ceil)) % n] = 0.5
        elif name == "ring":
            for j in {i, (i - 1) % n, (i + 1) % n}:
                weights[i, j] = 1 / 2 if n == 2 else 1 / 3
        elif name == "static_exponential":
            offsets = [2**j for j in range(n) if 2**j < n]
            for offset in [0, *offsets]:
                weights[i, (i - offset) % n] = 1 / (len(offsets) + 1)
        elif name == "one_peer_hypercube":
            weights[i, i] = 0.5
            weights[i, i ^ 2 ** (t % log2_ceil)] = 0.5
        else:
            raise AssertionError(name)
    return weights


def adjacency(name: str, n: int) -> NDArray[np.bool_]:
    """Who is a neighbour of whom, self excluded."""
    neighbours = np.zeros((n, n), dtype=bool)
    rows = max(r for r in range(1, n + 1) if n % r == 0 and r * r <= n)
    columns = n // rows
    for i, j in itertools.permutations(range(n), 2):
        row_gap, column_gap = abs(i // columns - j // columns), abs(i % columns - j % columns)
        if name == "torus":
            beside = row_gap == 0 and column_gap in (1, columns - 1)
            below = column_gap == 0 and row_gap in (1, rows - 1)
            neighbours[i, j] = beside or below
        elif name == "star":
            neighbours[i, j] = i == 0 or j == 0
        else:
            neighbours[i, j] = (i ^ j).bit_count() == 1
    return neighbours


def metropolis_from_adjacency(neighbours: NDArray[np.bool_]) -> Matrix:
    """w_ij = 1 / (1 + max(degree_i, degree_j)) for neighbours; the rest of 1 stays with i."""
    n = len(neighbours)
    weights = np.zeros((n, n))
    for i, j in itertools.permutations(range(n), 2):
        if neighbours[i, j]:
            weights[i, j] = 1 / (1 + max(neighbours[i].sum(), neighbours[j].sum()))
    for i in range(n):
        weights[i, i] = 1 - weights[i].sum()
    return weights


def from_edges(n: int, edges: Edges) -> Matrix:
    """Both ends take `weight` of each other and keep the rest."""
    weights = np.eye(n)
    for i, j, weight in edges:
        weights[i, j] += weight
        weights[j, i] += weight
        weights[i, i] -= weight
        weights[j, j] -= weight
    return weights


def reference_draw(name: str, n: int, t: int, seed: int) -> Matrix:
    """The random topologies, from the generator seeded with (seed, t)."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, t])))
    edges: Edges = []
    if name == "random_matching":
        order = generator.permutation(n)
        for place in range(0, n - 1, 2):
            edges.append((order[place], order[place + 1], 1 / 2))
        return from_edges(n, edges)
    offset, start = generator.integers(1, n), generator.integers(n)
    free = [True] * n
    for i in [*range(start, n), *range(start)]:
        j = (i + offset) % n
        if free[i] and free[j]:
            free[i] = free[j] = False
            edges.append((i, j, (n - 1) / n))
    return from_edges(n, edges)


def reference_base_k(n: int, k: int) -> list[Edges]:
    """Base(V): the better of Simple(V) and Simple on p groups followed by H_k across them."""
    simple = reference_simple(list(range(n)), k)
    q = n
    for prime in range(2, k + 2):
        while q % prime == 0:
            q //= prime
    p = n // q
    grouped: list[Edges] = []
    inside = [reference_simple(list(range(g * q, g * q + q)), k) for g in range(p)]
    for step in range(len(inside[0])):
        grouped.append([edge for graph in inside for edge in graph[step]])
    across = [reference_hyper([g * q + place for g in range(p)], k) for place in range(q)]
    for step in range(len(across[0])):
        grouped.append([edge for graph in across for edge in graph[step]])
    return simple if len(simple) < len(grouped) else grouped


def reference_hyper(nodes: list[int], k: int) -> list[Edges]:
    """H_k(V): in round l, nodes whose mixed-radix numbers differ in digit l only average uniformly."""
    factors = reference_factors(len(nodes), k + 1)
    assert factors is not None
    numbers = []
    for place in range(len(nodes)):
        digits = []
        for factor in factors:
            digits.append(place % factor)
            place //= factor
        numbers.append(digits)
    rounds: list[Edges] = []
    for digit, factor in enumerate(factors):
        edges: Edges = []
        for a, b in itertools.combinations(range(len(nodes)), 2):
            if [d for d in range(len(factors)) if numbers[a][d] != numbers[b][d]] == [digit]:
                edges.append((nodes[a], nodes[b], 1 / factor))
        rounds.append(edges)
    return rounds


def reference_factors(number: int, largest: int) -> list[int] | None:
    """The fewest factors up to `largest`, larger ones first, by trying all."""
    for count in range(number.bit_length()):
        for factors in itertools.product(range(largest, 1, -1), repeat=count):
            if math.prod(factors) == number:
                return list(factors)
    return None


def reference_simple(nodes: list[int], k: int) -> list[Edges]:
    """Simple(V), steps (1) to (3) of the appendix; `own_step` counts from a part's own link round on."""
    if reference_factors(len(nodes), k + 1) is not None:
        return reference_hyper(nodes, k)
    blocks_of = reference_blocks(nodes, k + 1)
    members = [[v for block in blocks for v in block] for blocks in blocks_of]
    last = len(members) - 1
    rounds: list[Edges] = []
    for step in range(len(reference_hyper(members[0], k))):
        rounds.append([edge for part in members for edge in reference_cycle(part, k, step)])
    for step in range(1 + len(reference_hyper(blocks_of[0][0], k))):
        edges: Edges = []
        for part, blocks in enumerate(blocks_of):
            if step < last and part == step:
                edges += reference_link(blocks, [v for later in members[part + 1 :] for v in later], k)
            own_step = step - part - 1 if part < last else step - last
            spread = [members[part]] if len(members[part]) < k + 1 else blocks
            if own_step >= 0:
                edges += [edge for block in spread for edge in reference_cycle(block, k, own_step)]
        rounds.append(edges)
    return rounds


def reference_blocks(nodes: list[int], base: int) -> list[list[list[int]]]:
    """V_1, V_2, ... each as its equal blocks of (k+1)^p nodes, cut off the front, largest p first."""
    parts = []
    for power in range(len(nodes), -1, -1):
        blocks = []
        while len(nodes) >= base**power:
            blocks.append(nodes[: base**power])
            nodes = nodes[base**power :]
        if blocks:
            parts.append(blocks)
    return parts


def reference_cycle(nodes: list[int], k: int, step: int) -> Edges:
    """H_k(V) at any step, round and round."""
    rounds = reference_hyper(nodes, k)
    return rounds[step % len(rounds)] if rounds else []


def reference_link(blocks: list[list[int]], later: list[int], k: int) -> Edges:
    """Step (2): every later node takes the last unused node of each block; what is left groups by k+1."""
    size = sum(len(block) for block in blocks)
    weight = size / (len(blocks) * (size + len(later)))
    unused = [list(block) for block in blocks]
    edges: Edges = []
    for node in reversed(later):
        for block in unused:
            edges.append((node, block.pop(), weight))
    left = [v for block in unused for v in block]
    while left:
        group, left = left[: k + 1], left[k + 1 :]
        for a, b in itertools.combinations(group, 2):
            edges.append((a, b, 1 / len(group)))
    return edges
