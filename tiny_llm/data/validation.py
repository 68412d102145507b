"""Validation blocks: the sequences that every evaluation of a run sees, in the order of the corpus.

Block k covers the tokens [k L, k L + L] of the validation split; the last block may be shorter and is
padded. In flow an opened cache; out flow the blocks in memory and how many of each block's targets count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiny_llm.data.cache import CacheError, TokenCache

READ_BLOCKS = 4096  # at once


def validation_blocks(
    cache: TokenCache, context_length: int, subset: int | None, seed: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """Return blocks [n, L + 1] and the number of valid targets of each block [n].

    `subset` chooses that many blocks at random, the same for the same seed, in their original order and
    gathered in one pass over the split; None, or at least as many as there are, gives all. Of a block with
    v valid targets the targets are its tokens 1 to v; what follows is padding (the EOS).
    """
    targets = cache.validation_tokens - 1
    if targets < 1:
        raise CacheError(
            f"the cache in {cache.directory} has no validation targets; raise data.held_out_share"
        )
    total = -(-targets // context_length)
    chosen = _choose(total, subset, seed)
    blocks = np.full((len(chosen), context_length + 1), cache.eos_id, np.uint16)
    for first in range(0, total, READ_BLOCKS):
        last = min(first + READ_BLOCKS, total)
        rows = np.flatnonzero((chosen >= first) & (chosen < last))
        if len(rows):
            blocks[rows] = _read(cache, context_length, first, last)[chosen[rows] - first]
    return blocks, np.minimum(context_length, targets - chosen * context_length)


def _choose(total: int, subset: int | None, seed: int) -> npt.NDArray[np.int64]:
    if subset is None or subset >= total:
        return np.arange(total)
    generator = np.random.default_rng(np.random.SeedSequence([seed]))
    return np.sort(generator.choice(total, subset, replace=False))


def _read(cache: TokenCache, context_length: int, first: int, last: int) -> npt.NDArray[np.uint16]:
    """Return blocks [first, last) as [last - first, L + 1], padded with the EOS."""
    start, stop = first * context_length, last * context_length + 1
    tokens = cache.read("validation", start, min(stop, cache.validation_tokens))
    padding = np.full(stop - start - len(tokens), cache.eos_id, np.uint16)
    tokens = np.concatenate((tokens, padding))
    return np.lib.stride_tricks.sliding_window_view(tokens, context_length + 1)[::context_length]
