"""The training stream, version 2: which sequence comes when, and getting it there in time.

Sequence k covers the tokens [k L, k L + L] of the training split: L inputs and one token of lookahead. It
belongs to the shuffle group (`group_size` consecutive shards) that holds its first token. Groups are
visited in file order; the rows of group g are permuted in pass p with

    numpy.random.default_rng(numpy.random.SeedSequence([seed, g]))      p = 0
    numpy.random.default_rng(numpy.random.SeedSequence([seed, g, p]))   p >= 1

always all of them, so the stream depends on cache, L, group size and seed alone. In flow an opened cache
and a position, the number of sequences delivered so far; out flow rows of L + 1 tokens. A group is held as
uint16, and one background thread reads the next one. A new stream starts inside the group of its position,
not before it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiny_llm.config.schema import DataConfig
from tiny_llm.data.cache import CacheError, TokenCache
from tiny_llm.data.command import door_command, prepare_command


class ExhaustedError(CacheError):
    """The corpus has no more sequences for this run."""


def sequences_per_pass(cache: TokenCache, context_length: int) -> int:
    """Return how many whole sequences, lookahead included, one pass over the training split has."""
    return max(0, cache.train_tokens - 1) // context_length


def check_capacity(cache: TokenCache, data: DataConfig, context_length: int, tokens_needed: int) -> None:
    """Raise ExhaustedError unless data.max_passes over the cache give `tokens_needed` training targets."""
    targets = sequences_per_pass(cache, context_length) * context_length
    if tokens_needed <= targets * data.max_passes:
        return
    passes = -(-tokens_needed // targets) if targets else 0
    if not cache.exhausted:
        way_out = f"enlarge it with: {prepare_command(data)}"
    elif passes:
        way_out = f"allow repeats with: {door_command('train', data, max_passes=passes)}"
    else:
        way_out = "choose a larger corpus or a shorter model.context_length"
    raise ExhaustedError(
        f"the run needs {tokens_needed:,} training targets; the cache in {cache.directory} gives "
        f"{targets:,} a pass and data.max_passes={data.max_passes}; {way_out}"
    )


@dataclass(frozen=True)
class Group:
    """The rows of one shuffle group in one pass."""

    sequences: npt.NDArray[np.uint16]
    """[rows, L + 1] in file order, views of one buffer: a row's lookahead is the next row's first token."""
    order: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Where a position lies: pass, group, and row within the permuted group."""

    repeat: int
    group: int
    row: int


class Shuffle:
    """The order of the stream: pure arithmetic over cache, L, group size and seed."""

    def __init__(self, cache: TokenCache, context_length: int, group_size: int, seed: int) -> None:
        self.cache = cache
        self.context_length = context_length
        self.shards_a_group = group_size
        self.seed = seed
        group_tokens = group_size * cache.shard_tokens
        firsts = np.arange(0, cache.train_tokens, group_tokens)
        rows = sequences_per_pass(cache, context_length)
        edges = np.minimum(-(-firsts // context_length), rows)
        self.edges = np.append(edges, rows)
        """[groups + 1]: sequences edges[g] to edges[g + 1] belong to group g; it may have none."""

    @property
    def sequences(self) -> int:
        return int(self.edges[-1])

    def place(self, position: int) -> Place:
        repeat, sequence = divmod(position, self.sequences)
        group = int(np.searchsorted(self.edges, sequence, side="right")) - 1
        return Place(repeat, group, sequence - int(self.edges[group]))

    def rows(self, group: int) -> int:
        return int(self.edges[group + 1] - self.edges[group])

    def read(self, repeat: int, group: int) -> Group:
        """Read and permute a group, after checking its shards. Raises DamagedCacheError."""
        first, last = int(self.edges[group]), int(self.edges[group + 1])
        length = self.context_length
        shards = self.cache.shards("train")
        for shard in shards[group * self.shards_a_group : (group + 1) * self.shards_a_group]:
            self.cache.verify_shard(shard)
        buffer = self.cache.read("train", first * length, last * length + 1)
        sequences = np.lib.stride_tricks.sliding_window_view(buffer, length + 1)[::length]
        key = [self.seed, group] if repeat == 0 else [self.seed, group, repeat]
        generator = np.random.default_rng(np.random.SeedSequence(key))
        return Group(sequences, generator.permutation(last - first))


class TrainingStream:
    """Delivers the rows of the stream from a position on, which alone is what a resumed run needs."""

    def __init__(
        self,
        cache: TokenCache,
        context_length: int,
        group_size: int,
        seed: int,
        max_passes: int,
        prefetch: bool,
        position: int = 0,
    ) -> None:
        self._shuffle = Shuffle(cache, context_length, group_size, seed)
        self._end = self._shuffle.sequences * max_passes
        if not 0 <= position <= self._end:
            raise ExhaustedError(
                f"position {position:,} is outside the {self._end:,} sequences of {cache.directory}"
            )
        self._position = position
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="loader") if prefetch else None
        self._current: tuple[int, int, Group] | None = None
        self._next: tuple[int, int, Future[Group]] | None = None

    @property
    def position(self) -> int:
        """The number of sequences delivered so far, those before this stream's start included."""
        return self._position

    def next_rows(self, rows: int, own: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Return the next rows, int64 [rows, L + 1], across the edges of groups and passes.

        own: which of them, ascending, to return; the others are passed over. Raises ExhaustedError when fewer are
        left, and what the background reader met (DamagedCacheError).
        """
        if self._position + rows > self._end:
            raise ExhaustedError(
                f"asked for sequences {self._position:,} to {self._position + rows:,}; the cache in "
                f"{self._shuffle.cache.directory} has {self._end:,} over all passes: raise data.max_passes"
            )
        own = np.arange(rows) if own is None else own
        batch = np.empty((len(own), self._shuffle.context_length + 1), np.int64)
        passed = 0
        while passed < rows:
            place = self._shuffle.place(self._position)
            group = self._group(place)
            chosen = group.order[place.row : place.row + rows - passed]
            here = slice(*np.searchsorted(own, (passed, passed + len(chosen))))
            batch[here] = group.sequences[chosen[own[here] - passed]]
            passed += len(chosen)
            self._position += len(chosen)
        return batch

    def close(self) -> None:
        """Stop the background reader."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _group(self, place: Place) -> Group:
        wanted = (place.repeat, place.group)
        if self._current is None or self._current[:2] != wanted:
            self._current = None  # frees the old group before another is read
            if self._next is not None and self._next[:2] == wanted:
                group = self._next[2].result()
            else:
                group = self._shuffle.read(*wanted)
            self._current = (*wanted, group)
            self._read_ahead()
        return self._current[2]

    def _read_ahead(self) -> None:
        """Start reading the group that comes after the current one, where there is one."""
        assert self._current is not None
        self._next = None
        repeat, group, _ = self._current
        after = repeat * self._shuffle.sequences + int(self._shuffle.edges[group + 1])
        if self._reader is not None and after < self._end:
            place = self._shuffle.place(after)
            future = self._reader.submit(self._shuffle.read, place.repeat, place.group)
            self._next = (place.repeat, place.group, future)
