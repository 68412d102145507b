"""Preparation: a token cache is there, whole, or it is made.

`ensure_cache` is what training calls: it opens a fitting cache at once and prepares one only where there is
none. `prepare` is the door's: it verifies an existing cache, or enlarges it. In flow the settings and the
number of targets wanted; out flows an opened cache. A lock keeps two preparations apart, and what
`pipeline.py` makes is published by one rename.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tiny_llm.config.errors import UserError, is_full
from tiny_llm.config.plan import cache_tokens
from tiny_llm.config.schema import DataConfig, HubCorpus
from tiny_llm.data.cache import CacheError, TokenCache, cache_directory
from tiny_llm.data.command import prepare_command
from tiny_llm.data.corpora import Report, open_corpus
from tiny_llm.data.manifest import MANIFEST_NAME
from tiny_llm.data.pipeline import PreparationError, fill
from tiny_llm.data.publication import locked, staged


def ensure_cache(data: DataConfig, tokens_needed: int, report: Report) -> TokenCache:
    """Open the cache of these settings, preparing it where there is none.

    `tokens_needed` counts training targets over all passes; 0 takes whatever there is. Raises UserError
    when a cache has other settings, is damaged, or is too small while its corpus holds more.
    """
    directory = cache_directory(data)
    if not (directory / MANIFEST_NAME).is_file():
        with _disk_errors(directory, data), locked(directory, waiting=report):
            if not (directory / MANIFEST_NAME).is_file():
                return _build(directory, data, tokens_needed, report)
    cache = TokenCache.open(directory, data)
    if not _is_enough(cache, data, tokens_needed):
        raise CacheError(
            f"the cache in {directory} has {cache.train_tokens:,} training tokens (data.max_passes="
            f"{data.max_passes}), this run needs {tokens_needed:,}; enlarge it with: {prepare_command(data)}"
        )
    return cache


def prepare(data: DataConfig, tokens_needed: int, report: Report) -> TokenCache:
    """Make sure by hand: verify every checksum of the cache, or prepare it, or a larger one in its place."""
    directory = cache_directory(data)
    with _disk_errors(directory, data), locked(directory, waiting=None):
        if not (directory / MANIFEST_NAME).is_file():
            return _build(directory, data, tokens_needed, report)
        cache = TokenCache.open(directory, data)
        if not _is_enough(cache, data, tokens_needed):
            report(f"prepare: {cache.train_tokens:,} training tokens are too few; preparing a larger cache")
            return _build(directory, data, tokens_needed, report, _at_its_commits(data, cache))
        if _has_changed(cache, data, report):
            report("prepare: the files of the corpus have changed; preparing the cache anew")
            return _build(directory, data, tokens_needed, report, grown=cache)
    return verify(data, report)


def verify(data: DataConfig, report: Report) -> TokenCache:
    """Check every checksum of an existing cache. Raises CacheError naming the first damaged file."""
    cache = TokenCache.open(cache_directory(data), data)
    cache.verify()
    shards = sum(1 for _ in cache.all_shards())
    report(f"prepare: {cache.directory} is whole: {shards} shards, every checksum right")
    report(_summary(cache))
    return cache


def capacity(data: DataConfig, tokens_needed: int) -> int | None:
    """Return how many training tokens to prepare; None means the whole corpus: local ones always are."""
    return cache_tokens(data, tokens_needed) if isinstance(data, HubCorpus) else None


def _is_enough(cache: TokenCache, data: DataConfig, tokens_needed: int) -> bool:
    """Whether the cache holds what is needed, or else the whole corpus."""
    wanted = capacity(data, tokens_needed) if tokens_needed else None
    return cache.exhausted or wanted is None or cache.train_tokens >= wanted


def _has_changed(cache: TokenCache, data: DataConfig, report: Report) -> bool:
    """Whether local files differ in name or size from those that were prepared; gone ones do not count."""
    if isinstance(data, HubCorpus):
        return False
    try:
        return bool(open_corpus(data, report).sources() != cache.manifest["corpus"]["sources"])
    except UserError:
        return False


def _at_its_commits(data: DataConfig, cache: TokenCache) -> DataConfig:
    """Return settings that name the commits of an existing cache, so that a larger one extends it."""
    if not isinstance(data, HubCorpus):
        return data
    corpus, tokenizer = cache.manifest["corpus"], cache.manifest["tokenizer"]
    return replace(data, revision=corpus["revision"], tokenizer_revision=tokenizer["revision"])


def _build(
    directory: Path,
    data: DataConfig,
    tokens_needed: int,
    report: Report,
    source: DataConfig | None = None,
    grown: TokenCache | None = None,
) -> TokenCache:
    """Prepare a cache and publish it; the caller holds the lock. `source` says where from, if not `data`."""
    if directory.exists() and not (directory / MANIFEST_NAME).is_file() and any(directory.iterdir()):
        raise CacheError(f"data.cache_dir={directory} holds other files; choose another data.cache_dir")
    report(f"prepare: preparing data={data.name} in {directory}")
    with staged(directory) as staging:
        fill(staging, data, source or data, capacity(data, tokens_needed), report, grown)
    cache = TokenCache.open(directory, data)
    report(f"prepare: wrote {directory}")
    report(_summary(cache))
    return cache


@contextlib.contextmanager
def _disk_errors(directory: Path, data: DataConfig) -> Iterator[None]:
    """Tell what the disk of the cache refuses as a PreparationError of one line."""
    try:
        yield
    except OSError as error:
        full = is_full(error)
        reason = "no space left on the disk" if full else f"{error.strerror or error}"
        raise PreparationError(
            f"cannot prepare {directory}: {reason}; nothing was kept: {'free some space, or ' if full else ''}"
            f"choose another place with: {prepare_command(data, cache_dir='DIRECTORY')}"
        ) from error


def _summary(cache: TokenCache) -> str:
    splits = cache.manifest["splits"]
    return (
        f"prepare: train {cache.train_tokens:,} tokens in {splits['train']['documents']:,} documents, "
        f"validation {cache.validation_tokens:,} in {splits['validation']['documents']:,}; "
        f"{cache.manifest['duplicates_dropped']:,} training documents dropped as duplicates of validation"
    )
