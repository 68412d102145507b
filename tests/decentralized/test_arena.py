"""The layout of a worker's row: where entries start, what comes first, and that views share the arena."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_llm.config.parameters import ParameterSpec, parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.decentralized.arena import Layout

sys.path.append(str(Path(__file__).parents[1]))
from reference.llama import ReferenceLlama
from reference.small import base_config

SMALL = base_config().model
MODELS = [
    SMALL,
    replace(SMALL, layers=3, width=10, heads=1, ffn_width=7),
    replace(SMALL, width=64, ffn_width=64),
]
by_model = pytest.mark.parametrize("model", MODELS, ids=["small", "odd", "aligned"])


@by_model
def test_entries_start_at_multiples_of_64_and_leave_no_gaps_but_padding(model: ModelConfig) -> None:
    layout = Layout.of(parameter_specs(model))
    end = 0
    for entry in layout.entries:
        assert entry.start % 64 == 0
        assert entry.start == end
        assert entry.numel == math.prod(entry.shape)
        assert entry.numel <= entry.padded_numel < entry.numel + 64
        assert entry.padded_numel % 64 == 0
        end = entry.start + entry.padded_numel
    assert layout.size == end


@by_model
def test_every_parameter_of_the_model_has_one_entry(model: ModelConfig) -> None:
    layout = Layout.of(parameter_specs(model))
    names = [entry.name for entry in layout.entries]
    assert len(names) == len(set(names))
    expected = {name: tuple(value.shape) for name, value in ReferenceLlama(model).named_parameters()}
    assert {entry.name: entry.shape for entry in layout.entries} == expected


@by_model
def test_matrices_come_first_and_are_what_decays(model: ModelConfig) -> None:
    layout = Layout.of(parameter_specs(model))
    kinds = [len(entry.shape) for entry in layout.entries]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {1, 2}
    for entry in layout.entries:
        assert entry.decays == (len(entry.shape) == 2)
        assert entry.decays == (entry.start < layout.decayed)


def test_what_decays_moves_to_the_front_in_its_order() -> None:
    specs = tuple(
        ParameterSpec(name, shape, decays, None)
        for name, shape, decays in (
            ("a", (3,), False),
            ("b", (2, 40), True),
            ("c", (64,), False),
            ("d", (1, 1), True),
        )
    )
    layout = Layout.of(specs)
    assert [(entry.name, entry.start, entry.padded_numel) for entry in layout.entries] == [
        ("b", 0, 128),
        ("d", 128, 64),
        ("a", 192, 64),
        ("c", 256, 64),
    ]
    assert layout.decayed == 192
    assert layout.size == 320


@by_model
def test_views_share_the_arena_without_overlap(model: ModelConfig) -> None:
    layout = Layout.of(parameter_specs(model))
    arena = torch.zeros(3, layout.size)
    for number, (name, view) in enumerate(layout.views(arena).items(), 1):
        entry = next(entry for entry in layout.entries if entry.name == name)
        assert view.shape == (3, *entry.shape)
        view += number
        for i in range(3):
            row = layout.views(arena[i])[name]
            assert row.shape == entry.shape
            assert row.data_ptr() == arena[i, entry.start :].data_ptr()
            assert torch.equal(row, view[i])
    expected = torch.zeros(layout.size)
    for number, entry in enumerate(layout.entries, 1):
        expected[entry.start : entry.start + entry.numel] = number
    assert torch.equal(arena, expected.expand(3, -1))


def test_a_view_fills_rows_first() -> None:
    layout = Layout.of((ParameterSpec("a", (2, 3), True, None),))
    row = torch.arange(64.0)
    assert layout.views(row)["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_plain_data_tells_the_whole_layout() -> None:
    layout = Layout.of(parameter_specs(SMALL))
    for plain, entry in zip(layout.plain(), layout.entries, strict=True):
        assert plain == {
            "name": entry.name,
            "shape": list(entry.shape),
            "start": entry.start,
            "numel": entry.numel,
            "padded_numel": entry.padded_numel,
            "decays": entry.decays,
        }
