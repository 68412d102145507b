"""The training stream equals its definition, spelled out below in loops, whatever the shapes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_cache import make_cache, stdlib_settings

from tiny_llm.data.cache import DamagedCacheError, TokenCache
from tiny_llm.data.loader import ExhaustedError, TrainingStream, check_capacity, sequences_per_pass


def stream_by_definition(
    tokens: list[int], shard_tokens: int, length: int, group_size: int, seed: int, passes: int
) -> list[list[int]]:
    """Return every row of the stream, from the definition of the stream and nothing else."""
    rows = []
    for repeat in range(passes):
        groups: dict[int, list[list[int]]] = {}
        k = 0
        while k * length + length < len(tokens):
            group = (k * length) // (group_size * shard_tokens)
            groups.setdefault(group, []).append([tokens[k * length + i] for i in range(length + 1)])
            k += 1
        for group in sorted(groups):
            key = [seed, group] if repeat == 0 else [seed, group, repeat]
            order = np.random.default_rng(np.random.SeedSequence(key)).permutation(len(groups[group]))
            for place in order:
                rows.append(groups[group][place])
    return rows


def random_cache(directory: Path, generator: np.random.Generator) -> tuple[TokenCache, list[int]]:
    shard_tokens = int(generator.integers(3, 40))
    tokens = generator.integers(0, 65536, int(generator.integers(30, 400)))
    cache = make_cache(directory, tokens, np.arange(5), shard_tokens)
    return cache, [int(token) for token in tokens]


@pytest.mark.parametrize("trial", range(25))
def test_stream_equals_its_definition_from_every_position(tmp_path: Path, trial: int) -> None:
    generator = np.random.default_rng(trial)
    cache, tokens = random_cache(tmp_path / "cache", generator)
    length = int(generator.integers(1, 24))
    group_size, seed, passes = (
        int(generator.integers(1, 4)),
        int(generator.integers(0, 9)),
        int(generator.integers(1, 4)),
    )
    expected = stream_by_definition(tokens, cache.shard_tokens, length, group_size, seed, passes)
    assert len(expected) == passes * sequences_per_pass(cache, length)
    for position in range(len(expected)):
        stream = TrainingStream(cache, length, group_size, seed, passes, False, position)
        assert stream.next_rows(1).tolist() == [expected[position]]
    for position in generator.integers(0, len(expected), 10):
        stream = TrainingStream(cache, length, group_size, seed, passes, trial % 2 == 0, position)
        while stream.position < len(expected):
            before = stream.position
            rows = stream.next_rows(min(int(generator.integers(1, 30)), len(expected) - before))
            assert rows.dtype == np.int64
            assert rows.tolist() == expected[before : stream.position]
        stream.close()


@pytest.mark.parametrize("prefetch", [True, False])
def test_resuming_reads_no_group_before_its_own(
    tmp_path: Path, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(100), np.arange(5), 10)
    starts: list[int] = []
    read = TokenCache.read

    def recorded(self: TokenCache, split: str, start: int, stop: int) -> np.ndarray:
        starts.append(start)
        return read(self, split, start, stop)  # type: ignore[arg-type]

    monkeypatch.setattr(TokenCache, "read", recorded)
    stream = TrainingStream(cache, 5, 2, 0, 1, prefetch, position=11)
    stream.next_rows(1)
    stream.close()
    assert starts[0] == 40
    assert starts == ([40, 60] if prefetch else [40])


def test_only_a_compact_copy_of_a_group_is_held(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(60000), np.arange(5), 10000)
    stream = TrainingStream(cache, 100, 2, 0, 1, prefetch=False)
    stream.next_rows(1)
    assert stream._current is not None
    sequences = stream._current[2].sequences
    first, last = np.lib.array_utils.byte_bounds(sequences)
    assert sequences.shape == (200, 101)
    assert last - first == 2 * 20001


def test_asking_for_more_than_there_is_names_the_numbers(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(101), np.arange(5), 50)
    stream = TrainingStream(cache, 10, 1, 0, 2, prefetch=True)
    assert stream.next_rows(20).shape == (20, 11)
    with pytest.raises(ExhaustedError, match="has 20 over all passes"):
        stream.next_rows(1)
    with pytest.raises(ExhaustedError, match="position 21"):
        TrainingStream(cache, 10, 1, 0, 2, prefetch=True, position=21)
    stream.close()


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_shard_damaged_during_the_run_is_named_where_it_is_needed(tmp_path: Path, prefetch: bool) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(100), np.arange(5), 20)
    damaged = cache.directory / "train-00002.bin"
    content = bytearray(damaged.read_bytes())
    content[7] ^= 1
    damaged.write_bytes(content)
    stream = TrainingStream(cache, 5, 1, 0, 1, prefetch)
    stream.next_rows(8)
    with pytest.raises(DamagedCacheError, match=r"train-00002\.bin"):
        stream.next_rows(1)
    with pytest.raises(DamagedCacheError, match=r"train-00002\.bin"):
        stream.next_rows(1)
    stream.close()


def test_closing_ends_the_background_reader(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(100), np.arange(5), 10)
    before = threading.active_count()
    stream = TrainingStream(cache, 5, 1, 0, 1, prefetch=True)
    stream.next_rows(1)
    assert threading.active_count() == before + 1
    stream.close()
    assert threading.active_count() == before


def test_too_small_a_corpus_is_refused_with_the_command_that_allows_repeats(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", np.arange(101), np.arange(5), 50)
    data = stdlib_settings(tmp_path)
    check_capacity(cache, data, 10, 100)
    check_capacity(cache, replace(data, max_passes=3), 10, 300)
    with pytest.raises(
        ExhaustedError, match=r"needs 101 .* gives 100 .* tiny_llm\.train .* data\.max_passes=2"
    ):
        check_capacity(cache, data, 10, 101)
    with pytest.raises(ExhaustedError, match=r"data\.max_passes=4"):
        check_capacity(cache, replace(data, max_passes=3), 10, 301)
    with pytest.raises(ExhaustedError, match="larger corpus"):
        check_capacity(cache, data, 101, 101)
