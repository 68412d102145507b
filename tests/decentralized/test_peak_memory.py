"""What N workers take at once: four arenas, and beside them only what the one whose turn it is needs.

Bytes are counted where torch allocates them, temporaries inside its kernels included, so that they are the same
in every run.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tiny_llm.training.engine import Engine

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import batches, one_thread, small_config, small_plan  # noqa: F401

SEQUENCES = 16  # of a worker in its one micro-batch
TOLERANCE = 1.1


@functools.cache
def peak_beyond_arenas(num_models: int, execution: str) -> int:
    """The most bytes that making an engine and its first update hold at once, less the four arenas."""
    config = small_config(
        decentralized={"scheme": "awc", "num_models": num_models, "execution": execution},
        model={"layers": 2, "width": 32, "ffn_width": 96, "context_length": 64},
        runtime={"precision": "fp32"},
    )
    plan = small_plan(config, updates=1, rows=SEQUENCES, micro_batch_size=SEQUENCES)
    (batch,) = batches(plan, 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = Engine(plan, torch.device("cpu"))
        engine.update(0, lambda: batch)
    assert engine.looped == (execution == "looped")
    return peak_bytes(profiler) - 4 * num_models * engine.model.layout.size * 4


def peak_bytes(profiler: profile) -> int:
    """The high-water mark of what was allocated and freed since the profiler began."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("num_models", [2, 4, 8])
def test_looped_workers_take_their_arenas_and_what_one_worker_needs(num_models: int) -> None:
    one = peak_beyond_arenas(1, "looped")
    assert one > 0
    assert peak_beyond_arenas(num_models, "looped") <= TOLERANCE * one


def test_batched_workers_take_more_than_one_worker_needs() -> None:
    """The bound can be broken: together, eight workers have the activations of eight."""
    assert peak_beyond_arenas(8, "batched") > 7 * TOLERANCE * peak_beyond_arenas(1, "looped")
