"""The token cache: the directory that preparation leaves behind and that everything later reads.

    train-00000.bin ...        tokens, uint16 little-endian, `shard_tokens` a shard, the last one shorter
    validation-00000.bin ...
    tokenizer/                 tokenizer.json and tokenizer_config.json
    manifest.json              what the bytes are and what made them (see `manifest.py`)

In flow a directory and the settings of this run; out flow tokens by position. Opening reads the manifest
and the sizes of the shards, never the tokens, so it takes milliseconds whatever the cache's size; `verify`
reads it all.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import DataConfig
from tiny_llm.data.command import prepare_command, remove_command
from tiny_llm.data.manifest import MANIFEST_NAME, ManifestError, Split, byte_settings, read_manifest
from tiny_llm.data.tokenizer import load

Tokens = npt.NDArray[np.uint16]
TOKENIZER = "tokenizer"


class CacheError(UserError):
    """A cache that is missing or does not fit this run."""


class DamagedCacheError(CacheError):
    """A cache whose files are not those that preparation wrote."""


def cache_directory(data: DataConfig) -> Path:
    """Return data.cache_dir as an absolute path, symbolic links followed."""
    return Path(data.cache_dir).expanduser().resolve()


@dataclass(frozen=True)
class TokenCache:
    """An opened cache. Positions count the tokens of a split from 0, across its shards."""

    directory: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, directory: Path, data: DataConfig) -> TokenCache:
        """Open a cache after checking manifest, shard sizes and settings. Raises CacheError."""
        if not (directory / MANIFEST_NAME).is_file():
            raise CacheError(f"no token cache in {directory}; make it with: {prepare_command(data)}")
        try:
            manifest = read_manifest(directory / MANIFEST_NAME)
        except ManifestError as error:
            raise DamagedCacheError(f"{error}; {_make_again(directory, data)}") from None
        _refuse_other_settings(directory, manifest["settings"], data)
        cache = cls(directory, manifest)
        for shard in cache.all_shards():
            found = _size(directory / shard["file"])
            if found != shard["bytes"]:
                state = (
                    "is missing" if found is None else f"has {found:,} bytes, the manifest {shard['bytes']:,}"
                )
                raise DamagedCacheError(
                    f"damaged cache: {directory / shard['file']} {state}; {_make_again(directory, data)}"
                )
        return cache

    @classmethod
    def read_only(cls, directory: Path) -> TokenCache:
        """Open a cache whatever settings it was made with, to read its tokens. Raises CacheError."""
        if not (directory / MANIFEST_NAME).is_file():
            raise CacheError(f"{directory} is no token cache: it holds no {MANIFEST_NAME}")
        try:
            return cls(directory, read_manifest(directory / MANIFEST_NAME))
        except ManifestError as error:
            raise DamagedCacheError(str(error)) from None

    @property
    def identity(self) -> str:
        """SHA-256 of the content: tokenizer, vocabulary and every shard."""
        return str(self.manifest["identity"])

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def eos_id(self) -> int:
        return int(self.manifest["eos_id"])

    @property
    def shard_tokens(self) -> int:
        return int(self.manifest["shard_tokens"])

    @property
    def train_tokens(self) -> int:
        return self.tokens("train")

    @property
    def validation_tokens(self) -> int:
        return self.tokens("validation")

    @property
    def exhausted(self) -> bool:
        """Whether the cache holds the whole corpus: no larger one can be prepared."""
        return bool(self.manifest["exhausted"])

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer; its `decode` gives valid text for any ids. Raises DamagedCacheError."""
        self.verify_tokenizer()
        return load(self.directory / TOKENIZER)

    def tokens(self, split: Split) -> int:
        return int(self.manifest["splits"][split]["tokens"])

    def shards(self, split: Split) -> list[dict[str, Any]]:
        """Return the manifest's entries of a split's shards: file, tokens, bytes, largest_id, sha256."""
        shards: list[dict[str, Any]] = self.manifest["splits"][split]["shards"]
        return shards

    def all_shards(self) -> Iterator[dict[str, Any]]:
        yield from self.shards("train")
        yield from self.shards("validation")

    def read(self, split: Split, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of a split. Raises DamagedCacheError for a shard cut short.

        Shards of the validation split are compared with their SHA-256, once; of the others the loader takes care.
        """
        assert 0 <= start <= stop <= self.tokens(split), (split, start, stop)
        tokens = np.empty(stop - start, dtype="<u2")
        for index in range(start // self.shard_tokens, -(-stop // self.shard_tokens)):
            first = index * self.shard_tokens
            low, high = max(start, first), min(stop, first + self.shard_tokens)
            shard = self.shards(split)[index]
            if split == "validation":
                self.verify_shard(shard)
            self._read_shard(shard, low - first, tokens[low - start : high - start])
        return tokens

    def _read_shard(self, shard: dict[str, Any], offset: int, into: Tokens) -> None:
        path = self.directory / shard["file"]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(2 * offset)
                wanted = into.view(np.uint8).data
                while wanted and (count := file.readinto(wanted)):
                    wanted = wanted[count:]
        except OSError as error:
            raise DamagedCacheError(f"damaged cache: cannot read {path}: {error.strerror}") from None
        if wanted:
            raise DamagedCacheError(f"damaged cache: {path} ends before its {shard['tokens']:,} tokens")

    def verify_shard(self, shard: dict[str, Any]) -> None:
        """Raise DamagedCacheError unless a shard's bytes have the manifest's SHA-256."""
        self._verify_file(shard["file"], shard["sha256"])

    def verify_tokenizer(self) -> None:
        """Raise DamagedCacheError unless the tokenizer is the one that made the tokens."""
        self._verify_file(f"{TOKENIZER}/tokenizer.json", self.manifest["tokenizer"]["fingerprint"])

    def verify(self) -> None:
        """Read every file of the cache and raise DamagedCacheError for the first that has changed."""
        self.verify_tokenizer()
        for shard in self.all_shards():
            self.verify_shard(shard)

    def _verify_file(self, name: str, expected: str) -> None:
        path = self.directory / name
        try:
            found = _sha256(path, path.stat().st_mtime_ns)
        except OSError as error:
            raise DamagedCacheError(f"damaged cache: cannot read {path}: {error.strerror}") from None
        if found != expected:
            raise DamagedCacheError(
                f"damaged cache: {path} has SHA-256 {found[:12]}..., the manifest {expected[:12]}...; "
                f"remove the cache with '{remove_command(self.directory)}' and prepare it again"
            )


@functools.lru_cache(maxsize=4096)
def _sha256(path: Path, mtime_ns: int) -> str:
    """Return the SHA-256 of a file as it was at `mtime_ns`: what has not changed since is not read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _make_again(directory: Path, data: DataConfig) -> str:
    return f"make it again with: {remove_command(directory)} && {prepare_command(data)}"


def _refuse_other_settings(directory: Path, cached: dict[str, Any], data: DataConfig) -> None:
    """Raise CacheError naming each setting that decides the bytes and differs, with both values."""
    wanted = byte_settings(data)
    differing = [
        f"data.{key} (cache: {cached.get(key)!r}, now: {wanted.get(key)!r})"
        for key in dict.fromkeys([*wanted, *cached])
        if cached.get(key) != wanted.get(key)
    ]
    if differing:
        other = directory.with_name(f"{directory.name}-2")
        raise CacheError(
            f"the cache in {directory} was prepared with other settings: {', '.join(differing)}; "
            f"keep both with: {prepare_command(data, cache_dir=str(other))}, "
            f"or replace it with: {remove_command(directory)} && {prepare_command(data)}"
        )
