"""The Base-(k+1) graph: exact consensus in finitely many rounds for any number of workers, degree at most k.

A graph here is a list of rounds, one for each mixing step of a period; a round is a set of undirected edges
with weights. `base_k_rounds` is the way in; `topology.py` turns each round into a mixing matrix (a node keeps
what its edges leave of 1). Weights are fractions, so that what adds up to 1 on paper does so here.

Three constructions stand on one another (Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph:
Communication-Efficient Topologies for Decentralized Learning via Finite-time Convergence", NeurIPS 2023,
arXiv:2305.11420, Algorithms 1 to 3):

- `hyper_hypercube`: sizes that are products of factors up to k+1; one round a factor.
- `simple_rounds`: any size. The nodes are cut into parts, as the digits of the size in base k+1 say; each
  part reaches its own average, the parts hand their averages over, and then spread what they heard.
- `base_k_rounds`: any size, in fewer rounds. What the size has of small factors goes to a hyper-hypercube,
  the rest to `simple_rounds`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

Round = dict[tuple[int, int], Fraction]
"""Undirected weighted edges (i, j) of one mixing step; every pair appears once."""

Part = list[list[int]]
"""The nodes of one digit of the size in base k+1: `digit` blocks of equal size, a power of k+1."""


def base_k_rounds(num_models: int, k: int) -> list[Round]:
    """Return one period of the Base-(k+1) graph on nodes 0..num_models-1 (Algorithm 3).

    The product of the rounds from the first to the last is exactly 1/N everywhere; that of as many rounds
    from inside a period on need not be. One node needs no round.
    """
    simple = simple_rounds(range(num_models), k)
    num_groups = _smooth_part(num_models, k)
    group_size = num_models // num_groups
    groups = [range(start, start + group_size) for start in range(0, num_models, group_size)]
    within = _side_by_side([simple_rounds(group, k) for group in groups])
    across = _side_by_side([hyper_hypercube(same_place, k) for same_place in zip(*groups, strict=True)])
    grouped = within + across
    return simple if len(simple) < len(grouped) else grouped


def simple_rounds(nodes: Iterable[int], k: int) -> list[Round]:
    """Return the Simple Base-(k+1) graph of any number of nodes (Algorithm 2).

    With V_1, V_2, ... the parts from large to small: all average inside themselves; V_1 links to all that
    come after it, then V_2 does, up to the last but one; a part that has linked averages inside its blocks
    (the last part does so when the last link is done).
    """
    nodes = list(nodes)
    if shortest_factors(len(nodes), k + 1) is not None:
        return hyper_hypercube(nodes, k)
    parts = _split_by_digits(nodes, k + 1)
    averaging = [hyper_hypercube(_members([part]), k) for part in parts]
    spreading = [_spread_inside(part, k) for part in parts]
    num_links = len(parts) - 1
    rounds = [_cycle(averaging, [step] * len(parts)) for step in range(len(averaging[0]))]
    for step in range(1 + len(spreading[0])):
        since_own_link = [step - 1 - min(index, num_links - 1) for index in range(len(parts))]
        links = _link(parts[step], parts[step + 1 :], k) if step < num_links else {}
        rounds.append(links | _cycle(spreading, since_own_link))
    return rounds


def hyper_hypercube(nodes: Iterable[int], k: int) -> list[Round]:
    """Return H_k (Algorithm 1): in round l the nodes that differ only in digit l average uniformly.

    The digits are those of a node's place in `nodes`, in the mixed radix of `shortest_factors`, lowest first.
    """
    nodes = list(nodes)
    factors = shortest_factors(len(nodes), k + 1)
    assert factors is not None, f"{len(nodes)} has a prime factor above {k + 1}"
    rounds = []
    stride = 1
    for factor in factors:
        groups: dict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            digit = place // stride % factor
            groups[place - digit * stride].append(node)
        rounds.append(_average(groups.values()))
        stride *= factor
    return rounds


@lru_cache(maxsize=4096)
def shortest_factors(number: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors in 2..largest whose product is `number`, or None where there are none."""
    if number == 1:
        return ()
    best: tuple[int, ...] | None = None
    for factor in range(min(largest, number), 1, -1):
        rest = shortest_factors(number // factor, largest) if number % factor == 0 else None
        if rest is not None and (best is None or 1 + len(rest) < len(best)):
            best = (factor, *rest)
    return best


def _smooth_part(number: int, k: int) -> int:
    """Return the largest divisor of `number` without a prime factor above k+1."""
    powers = 1
    for factor in range(2, k + 2):
        power = factor
        while power <= number:
            powers *= factor
            power *= factor
    return math.gcd(number, powers)


def _split_by_digits(nodes: list[int], base: int) -> list[Part]:
    """Cut `nodes` into one part for each non-zero digit of their count in `base`, highest digit first."""
    block_size = 1
    while block_size * base <= len(nodes):
        block_size *= base
    parts = []
    start = 0
    while block_size >= 1:
        digit = (len(nodes) - start) // block_size
        stop = start + digit * block_size
        if digit:
            parts.append([nodes[first : first + block_size] for first in range(start, stop, block_size)])
        start = stop
        block_size //= base
    return parts


def _link(part: Part, later_parts: list[Part], k: int) -> Round:
    """Link every node of the later parts to one node in each block of `part`: all then agree with the whole.

    The weight |V_j| / (a_j * sum_{m>=j} |V_m|) gives each later node its share of V_j's average. Blocks give
    their last nodes. The others average among themselves: on paper they are equal already, but in training
    every update moves them apart again.
    """
    later = _members(later_parts)
    size = len(_members([part]))
    weight = Fraction(size, len(part) * (size + len(later)))
    links = {pair: weight for block in part for pair in zip(block[-len(later) :], later, strict=True)}
    unused = [node for block in part for node in block[: -len(later)]]
    return links | _average(unused[first : first + k + 1] for first in range(0, len(unused), k + 1))


def _spread_inside(part: Part, k: int) -> list[Round]:
    """Average inside each block of the part, or inside the whole part where its blocks are single nodes."""
    blocks = part if len(_members([part])) > k else [_members([part])]
    return _side_by_side([hyper_hypercube(block, k) for block in blocks])


def _cycle(graphs: list[list[Round]], steps: list[int]) -> Round:
    """Return the edges of each graph at its own step, going round its period; a step below 0 has none."""
    edges: Round = {}
    for rounds, step in zip(graphs, steps, strict=True):
        if rounds and step >= 0:
            edges |= rounds[step % len(rounds)]
    return edges


def _side_by_side(graphs: list[list[Round]]) -> list[Round]:
    """Run graphs of the same length on different nodes at the same time."""
    return [_cycle(graphs, [step] * len(graphs)) for step in range(len(graphs[0]))]


def _average(groups: Iterable[list[int]]) -> Round:
    """Return the edges with which each group moves to its uniform average."""
    return {pair: Fraction(1, len(group)) for group in groups for pair in combinations(group, 2)}


def _members(parts: list[Part]) -> list[int]:
    return [node for part in parts for block in part for node in block]
