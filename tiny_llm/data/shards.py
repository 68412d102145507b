"""Writing shards: encoded batches go in, files of `shard_tokens` uint16 each come out, train and validation
apart.

Each shard is hashed and its largest id checked while it is written, and it is on the disk (fsync) before
the next one is begun. Writing stops at the very token that fills the requested capacity, so that what a
cache holds does not depend on batches or workers. Out flow the entries of the splits and their shards for
the manifest.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tiny_llm.config.errors import UserError
from tiny_llm.data.encoding import Batch, Encoded
from tiny_llm.data.manifest import Split


class TokenRangeError(UserError):
    """A token id outside the vocabulary of the model."""


class ShardWriter:
    """Appends tokens to the shards of a split; `tokens` and `documents` count what has been written."""

    def __init__(self, directory: Path, split: str, shard_tokens: int, vocab_size: int) -> None:
        self.tokens = 0
        self.documents = 0
        self.shards: list[dict[str, Any]] = []
        self._directory = directory
        self._split = split
        self._shard_tokens = shard_tokens
        self._vocab_size = vocab_size
        self._file: BinaryIO | None = None

    def write(self, tokens: npt.NDArray[np.uint16], documents: int) -> None:
        """Append the tokens of whole documents. Raises TokenRangeError, OSError."""
        self.documents += documents
        self.tokens += len(tokens)
        while len(tokens):
            if self._file is None:
                self._begin()
            room = self._shard_tokens - self.shards[-1]["tokens"]
            self._append(tokens[:room])
            tokens = tokens[room:]
            if self.shards[-1]["tokens"] == self._shard_tokens:
                self._finish_shard()

    def finish(self) -> dict[str, Any]:
        """Finish the last shard and return the split's part of the manifest."""
        self._finish_shard()
        return {"tokens": self.tokens, "documents": self.documents, "shards": self.shards}

    def close(self) -> None:
        """Close the file that an error left open."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        name = f"{self._split}-{len(self.shards):05d}.bin"
        self._file = (self._directory / name).open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self.shards.append({"file": name, "tokens": 0, "bytes": 0, "largest_id": 0})

    def _append(self, tokens: npt.NDArray[np.uint16]) -> None:
        assert self._file is not None
        shard = self.shards[-1]
        largest = int(tokens.max())
        if largest >= self._vocab_size:
            raise TokenRangeError(
                f"{shard['file']}: token id {largest} is outside data.vocab_size={self._vocab_size}; "
                f"set data.vocab_size={largest + 1} or more"
            )
        content = tokens.astype("<u2", copy=False).tobytes()
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]
        self._hash.update(content)
        shard["tokens"] += len(tokens)
        shard["bytes"] += len(content)
        shard["largest_id"] = max(shard["largest_id"], largest)

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.shards[-1]["sha256"] = self._hash.hexdigest()


class SplitWriter:
    """Writes both splits in document order until the training split holds `limit` tokens (None: no limit)."""

    def __init__(self, directory: Path, shard_tokens: int, vocab_size: int, limit: int | None) -> None:
        self.train = ShardWriter(directory, "train", shard_tokens, vocab_size)
        self.validation = ShardWriter(directory, "validation", shard_tokens, vocab_size)
        self.duplicates = 0
        self._limit = limit

    @property
    def full(self) -> bool:
        return self.train.tokens == self._limit

    def write(self, batch: Batch, encoded: Encoded) -> None:
        """Append a batch, or the part of it before the training split is full."""
        splits = np.array(batch.splits)
        lengths = encoded.lengths
        room = None if self._limit is None else self._limit - self.train.tokens
        if room is not None:
            filled = np.cumsum(np.where(splits == "train", lengths, 0))
            splits = splits[: int(np.searchsorted(filled, room)) + 1]
            lengths = lengths[: len(splits)]
        written = encoded.tokens[: int(lengths.sum())]
        for writer, split, most in ((self.train, "train", room), (self.validation, "validation", None)):
            chosen = splits == split
            tokens = written if chosen.all() else written[np.repeat(chosen, lengths)]
            writer.write(tokens[:most], int(chosen.sum()))
        self.duplicates += int((splits == "duplicate").sum())

    def finish(self) -> dict[Split, dict[str, Any]]:
        """Finish both splits and return their parts of the manifest."""
        return {"train": self.train.finish(), "validation": self.validation.finish()}

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.train.close()
        self.validation.close()
