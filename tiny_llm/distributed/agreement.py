"""What ranks must have in common before they train together, compared word for word."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

import tiny_llm
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.parse import show
from tiny_llm.config.plan import Plan
from tiny_llm.config.saved import flatten, plain
from tiny_llm.decentralized.topology import Topology
from tiny_llm.distributed.ranks import Ranks

LOCAL = (
    "runtime.device",
    "runtime.threads",
    "data.cache_dir",
    "data.prefetch",
    "data.prepare_workers",
    "output_dir",
)
TOPOLOGY_STEPS = 8  # that are compared


def agreed(ranks: Ranks, plan: Plan, topology: Topology) -> Plan:
    """Return the plan with the first rank's output_dir. Raises ConfigError naming the first thing that differs."""
    directory = ranks.told(plan.config.output_dir)
    facts = {key: value for key, value in flatten(plain(plan.config)).items() if key not in LOCAL}
    facts |= {
        "version of tiny_llm": tiny_llm.__version__,
        "version of torch": torch.__version__,
        "topology": [topology.peers(t) for t in range(TOPOLOGY_STEPS)],
    }
    compare(ranks, facts)
    return replace(plan, config=replace(plan.config, output_dir=directory))


def compare(ranks: Ranks, facts: dict[str, object]) -> None:
    """Raise ConfigError, on all ranks alike, unless all ranks state the same facts."""
    stated = [json.loads(word) for word in ranks.words(json.dumps(facts))]
    for rank, other in enumerate(stated):
        for key in sorted(stated[0].keys() | other.keys()):
            here, there = stated[0].get(key), other.get(key)
            if here != there:
                values = f": {show(here)} on rank 0, {show(there)} on rank {rank}"
                raise ConfigError(
                    f"the ranks differ in {key}{values if len(values) < 200 else f' (rank 0 and rank {rank})'}; "
                    "start all with the same command, files and environment"
                )
