"""`kind=processes` measures packed, gossip and data parallel side by side, and the bytes that were predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    "model=tiny",
    "model.layers=1",
    "runtime.precision=fp32",
    "runtime.compile=false",
    "num_models=[2]",
    "topologies=[one_peer_ring]",
    "sequences=2",
    "context_length=32",
    "windows=2",
    "updates=1",
]


def own_network() -> list[str]:
    """Return how to run a command where the loopback carries its bytes alone; nothing where that is not allowed."""
    words = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        return (
            words if not subprocess.run([*words, "true"], capture_output=True, check=False).returncode else []
        )
    except FileNotFoundError:
        return []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("benchmark") / "numbers.json"
    command = [
        *own_network(),
        sys.executable,
        "-m",
        "tiny_llm.benchmark",
        "kind=processes",
        *SMALL,
        f"json={path}",
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2], timeout=120)
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


def test_every_way_has_its_row(results: list[dict[str, Any]]) -> None:
    assert [(row["name"], row["ranks"]) for row in results] == [
        ("packed, awc", 1),
        ("awc, one_peer_ring", 2),
        ("atc, one_peer_ring", 2),
        ("data parallel", 2),
        ("torch's DDP", 2),
    ]
    assert all(row["tokens_per_second"]["min"] > 0 for row in results)


def test_ways_are_compared_with_the_last_on_as_many_ranks(results: list[dict[str, Any]]) -> None:
    assert results[0]["of_last"] is None
    assert results[-1]["of_last"] == {"median": 1, "min": 1, "max": 1}
    assert all(row["of_last"]["median"] > 0 for row in results[1:])


def test_the_bytes_on_the_wire_are_those_predicted(results: list[dict[str, Any]]) -> None:
    packed, *on_ranks = results
    assert packed["predicted_bytes_sent"] == 0
    for row in on_ranks[:-1]:
        assert 1.0 <= row["bytes_sent"]["min"] / row["predicted_bytes_sent"] < 1.1, row["name"]
