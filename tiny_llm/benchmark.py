"""Measure this machine: `python -m tiny_llm.benchmark kind=packed model=20m num_models=[4,8]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Literal

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import config_groups, override_key, user_errors_in_one_line
from tiny_llm.config.errors import nearest
from tiny_llm.config.parse import all_keys, unknown_key
from tiny_llm.config.schema import PositiveInt


@dataclass(frozen=True)
class BenchmarkArguments:
    """Every other KEY=VALUE is an override of the run that is measured, such as model=20m."""

    kind: Literal[
        "train", "packed", "update", "loader", "prepare", "evaluate", "startup", "sample", "processes"
    ]
    num_models: tuple[PositiveInt, ...] = (4,)
    sequences: PositiveInt = 16
    context_length: PositiveInt = 512
    windows: PositiveInt = 5
    updates: PositiveInt = 2
    executions: tuple[Literal["auto", "batched", "looped"], ...] = ("auto", "batched", "looped")
    ranks: PositiveInt = 2
    topologies: tuple[str, ...] = ("one_peer_exponential", "complete")
    baselines: bool = True
    json: str | None = None


def main() -> None:
    with user_errors_in_one_line():
        own = {entry.name for entry in fields(BenchmarkArguments)}
        is_own = [word.partition("=")[0] in own or word in ("-h", "--help") for word in sys.argv[1:]]
        words = list(zip(sys.argv[1:], is_own, strict=True))
        arguments = parse_arguments("benchmark", BenchmarkArguments, [word for word, own in words if own])
        others = [word for word, own in words if not own]
        known = [*own, *all_keys(), *config_groups()]
        for key in map(override_key, others):
            if key not in known and not key.startswith("hydra"):
                raise unknown_key(key, known if nearest(key, known) else [*own])
        from tiny_llm.benchmarks.suite import run_suite

        run_suite(arguments, others)


if __name__ == "__main__":
    main()
