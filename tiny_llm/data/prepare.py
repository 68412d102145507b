"""Preparation: a corpus becomes a token cache, whole or not at all.

    corpus -> split, duplicates -> shuffle -> batches -> tokenizer processes -> one writer -> directory

Everything up to the batches runs in this process; the results come back in order, so the bytes depend on
corpus and settings alone. `ensure_cache` is what training calls: it opens a fitting cache at once and
prepares one only where there is none. `prepare` is the door's: it verifies an existing cache, or enlarges
it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import DataConfig, HubCorpus, StdlibCorpus, TextCorpus
from tiny_llm.data import tokenizer as tok
from tiny_llm.data.cache import TOKENIZER, CacheError, TokenCache, cache_directory
from tiny_llm.data.command import prepare_command
from tiny_llm.data.corpora import (
    Corpus,
    Document,
    Report,
    divide,
    open_corpus,
    shuffle,
    smallest_share,
    training_sample,
)
from tiny_llm.data.encoding import batches, encode_in_order
from tiny_llm.data.manifest import MANIFEST_NAME, Split, byte_settings, seal
from tiny_llm.data.publication import locked, staged
from tiny_llm.data.shards import SplitWriter

REPORT_SECONDS = 5.0


class PreparationError(UserError):
    """A corpus that cannot become a cache."""


def ensure_cache(data: DataConfig, tokens_needed: int, report: Report) -> TokenCache:
    """Open the cache of these settings, preparing it where there is none.

    `tokens_needed` counts training targets over all passes; 0 takes whatever there is. Raises UserError
    when a cache has other settings, is damaged, or is too small while its corpus holds more.
    """
    directory = cache_directory(data)
    if not (directory / MANIFEST_NAME).is_file():
        with locked(directory, waiting=report):
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
    with locked(directory, waiting=None):
        if not (directory / MANIFEST_NAME).is_file():
            return _build(directory, data, tokens_needed, report)
        cache = TokenCache.open(directory, data)
        if not _is_enough(cache, data, tokens_needed):
            report(f"prepare: {cache.train_tokens:,} training tokens are too few; preparing a larger cache")
            return _build(directory, data, tokens_needed, report)
        if _has_changed(cache, data, report):
            report("prepare: the files of the corpus have changed; preparing the cache anew")
            return _build(directory, data, tokens_needed, report)
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
    """Return how many training tokens to prepare: whole shuffle groups and one token of lookahead.

    None means the whole corpus: local ones always are.
    """
    if not isinstance(data, HubCorpus):
        return None
    group = data.shuffle_group_size * data.shard_tokens
    targets = -(-tokens_needed // data.max_passes)
    return max(1, -(-targets // group)) * group + 1


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


def _build(directory: Path, data: DataConfig, tokens_needed: int, report: Report) -> TokenCache:
    """Prepare a cache and publish it; the caller holds the lock."""
    if directory.exists() and not (directory / MANIFEST_NAME).is_file() and any(directory.iterdir()):
        raise CacheError(f"data.cache_dir={directory} holds other files; choose another data.cache_dir")
    try:
        with staged(directory) as staging:
            _fill(staging, data, capacity(data, tokens_needed), report)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        elsewhere = prepare_command(data, cache_dir="DIRECTORY")
        raise PreparationError(
            f"no space left on the disk of {directory.parent} while preparing {directory.name}; "
            f"nothing was kept: free some space, or choose another disk with: {elsewhere}"
        ) from None
    cache = TokenCache.open(directory, data)
    report(f"prepare: wrote {directory}")
    report(_summary(cache))
    return cache


def _summary(cache: TokenCache) -> str:
    splits = cache.manifest["splits"]
    return (
        f"prepare: train {cache.train_tokens:,} tokens in {splits['train']['documents']:,} documents, "
        f"validation {cache.validation_tokens:,} in {splits['validation']['documents']:,}; "
        f"{cache.manifest['duplicates_dropped']:,} training documents dropped as duplicates of validation"
    )


def _fill(staging: Path, data: DataConfig, limit: int | None, report: Report) -> None:
    """Write tokenizer, shards and manifest into an empty directory."""
    corpus = open_corpus(data, report)
    facts = _make_tokenizer(data, corpus, staging / TOKENIZER, report)
    tok.check_vocabulary(facts, data.vocab_size)
    documents = shuffle(
        divide(corpus.documents(), data.held_out_share), data.shuffle_buffer, data.shuffle_seed
    )
    with SplitWriter(staging, data.shard_tokens, data.vocab_size, limit) as writer:
        _write_tokens(documents, writer, staging / TOKENIZER, facts.eos_id, data, report)
        splits = writer.finish()
    _refuse_empty(splits, data, corpus)
    manifest = {
        "corpus": {"name": data.name, "revision": corpus.revision, "sources": corpus.sources()},
        "tokenizer": facts.as_json(),
        "vocab_size": data.vocab_size,
        "eos_id": facts.eos_id,
        "shard_tokens": data.shard_tokens,
        "settings": byte_settings(data),
        "preprocessing": {"eos": "after every document", "tokenizers": tokenizers.__version__},
        "splits": splits,
        "duplicates_dropped": writer.duplicates,
        "exhausted": not writer.full,
    }
    (staging / MANIFEST_NAME).write_bytes(seal(manifest))


def _make_tokenizer(data: DataConfig, corpus: Corpus, directory: Path, report: Report) -> tok.TokenizerFacts:
    """Train or fetch the tokenizer of a corpus and save it in `directory`."""
    if isinstance(data, StdlibCorpus) or data.tokenizer == "bpe":
        report(f"prepare: training a byte-level BPE of {data.vocab_size:,} entries")
        texts = training_sample(corpus, data.held_out_share, tok.SAMPLE_BYTES)
        return tok.train_bpe(texts, data.vocab_size, directory)
    path = Path(data.tokenizer).expanduser()
    if isinstance(data, TextCorpus) and (path.suffix == ".json" or path.is_dir()):
        return tok.import_tokenizer(
            path / "tokenizer.json" if path.is_dir() else path, data.tokenizer, None, directory
        )
    from tiny_llm.data.hub import fetch_tokenizer

    source, revision = fetch_tokenizer(data, report)
    return tok.import_tokenizer(source, data.tokenizer, revision, directory)


def _write_tokens(
    documents: Iterator[Document],
    writer: SplitWriter,
    tokenizer: Path,
    eos_id: int,
    data: DataConfig,
    report: Report,
) -> None:
    """Encode documents and write them until they end or the writer is full, telling how far it is."""
    started = told = time.monotonic()
    encoded = encode_in_order(
        batches(documents, data.batch_documents), tokenizer, eos_id, data.prepare_workers
    )
    try:
        for batch, tokens in encoded:
            writer.write(batch, tokens)
            if writer.full:
                break
            if (now := time.monotonic()) - told >= REPORT_SECONDS:
                report(_progress(writer, now - started))
                told = now
        report(_progress(writer, time.monotonic() - started))
    finally:
        encoded.close()  # drains the workers before their directory goes


def _progress(writer: SplitWriter, seconds: float) -> str:
    documents = writer.train.documents + writer.validation.documents
    tokens = writer.train.tokens + writer.validation.tokens
    return f"prepare: {documents:,} documents, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s"


def _refuse_empty(splits: dict[Split, dict[str, Any]], data: DataConfig, corpus: Corpus) -> None:
    """Raise PreparationError, with a share that works, unless each split has at least one target."""
    if min(split["tokens"] for split in splits.values()) > 1:
        return
    found = " and ".join(f"{part['documents']:,} {split} documents" for split, part in splits.items())
    message = f"data={data.name}: the corpus gives {found}; each split needs one"
    if isinstance(data, HubCorpus):
        raise PreparationError(f"{message}: check data.train_split and data.validation_split")
    share = smallest_share(corpus)
    if share is None:
        raise PreparationError(
            f"{message}: separate documents in .txt files by lines of data.separator, or add files"
        )
    raise PreparationError(f"{message}: use data.held_out_share={share:.4g}")
