"""Validation blocks: the whole split once and in order, or a fixed random subset of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_cache import make_cache

from tiny_llm.data import validation
from tiny_llm.data.cache import CacheError
from tiny_llm.data.validation import validation_blocks


@pytest.mark.parametrize("trial", range(20))
def test_all_blocks_hold_every_target_once(
    tmp_path: Path, trial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "READ_BLOCKS", 3)
    generator = np.random.default_rng(trial)
    tokens = generator.integers(1, 65536, int(generator.integers(2, 200)))
    length = int(generator.integers(1, 20))
    cache = make_cache(tmp_path / "cache", np.arange(9), tokens, int(generator.integers(3, 40)))
    blocks, valid = validation_blocks(cache, length, None, 0)
    targets = [
        int(token) for block, count in zip(blocks, valid, strict=True) for token in block[1 : count + 1]
    ]
    inputs = [int(token) for block, count in zip(blocks, valid, strict=True) for token in block[:count]]
    assert targets == tokens[1:].tolist()
    assert inputs == tokens[:-1].tolist()
    assert blocks.dtype == np.uint16
    assert all(
        block[count + 1 :].tolist() == [0] * (length - count)
        for block, count in zip(blocks, valid, strict=True)
    )


@pytest.mark.parametrize("subset", [1, 5, 17])
def test_a_subset_is_fixed_by_its_seed_and_keeps_the_order(
    tmp_path: Path, subset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "READ_BLOCKS", 4)
    cache = make_cache(tmp_path / "cache", np.arange(9), np.arange(178), 30)
    every, counts = validation_blocks(cache, 10, None, 0)
    blocks, valid = validation_blocks(cache, 10, subset, 7)
    places = blocks[:, 0] // 10
    assert len(blocks) == subset
    assert (np.diff(places.astype(int)) > 0).all()
    assert (blocks == every[places]).all()
    assert (valid == counts[places]).all()
    assert (validation_blocks(cache, 10, subset, 7)[0] == blocks).all()


def test_subsets_of_other_seeds_differ(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(9), np.arange(1000), 300)
    drawn = {tuple(validation_blocks(cache, 10, 20, seed)[0][:, 0]) for seed in range(5)}
    assert len(drawn) == 5


def test_a_subset_as_large_as_the_split_is_the_split(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(9), np.arange(178), 30)
    assert (validation_blocks(cache, 10, 18, 3)[0] == validation_blocks(cache, 10, None, 0)[0]).all()


def test_a_split_without_targets_is_refused(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(9), np.arange(1), 30)
    with pytest.raises(CacheError, match="no validation targets"):
        validation_blocks(cache, 10, None, 0)
