"""From a corpus to the files of a cache: the chain that preparation runs.

    corpus -> split, duplicates -> shuffle -> batches -> tokenizer processes -> one writer -> manifest

In flow the settings and an empty directory; out flow tokenizer/, the shards and manifest.json in it.
Everything up to the batches and all writing runs in this process, and the tokens come back in the order of
the documents, so the bytes depend on corpus and settings alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import DataConfig, HubCorpus, StdlibCorpus, TextCorpus
from tiny_llm.data import tokenizer as tok
from tiny_llm.data.cache import TOKENIZER, TokenCache
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
from tiny_llm.data.manifest import MANIFEST_NAME, Split, byte_settings, held_out_tokens, seal
from tiny_llm.data.shards import SplitWriter
from tiny_llm.data.tail import Tail, copy_tokenizer, find_tail, tail_of

REPORT_SECONDS = 5.0


class PreparationError(UserError):
    """A corpus that cannot become a cache, or a disk that cannot take it."""


def fill(
    staging: Path,
    data: DataConfig,
    source: DataConfig,
    limit: int | None,
    report: Report,
    grown: TokenCache | None = None,
) -> None:
    """Write tokenizer, shards and manifest into an empty directory.

    `source` are the settings that documents and tokenizer come from, `data` those that the manifest records.
    Stops at `limit` training tokens; None takes the whole corpus. `grown` is the cache of this corpus before it
    grew, whose held-out tail stays. Raises UserError, OSError.
    """
    corpus = open_corpus(source, report)
    count = held_out_tokens(data)
    tail: Tail | None
    if count and grown is not None:
        facts, tail = copy_tokenizer(grown, staging / TOKENIZER), tail_of(grown)
    else:
        facts = _make_tokenizer(source, corpus, staging / TOKENIZER, report)
        tail = find_tail(corpus, staging / TOKENIZER, facts.eos_id, count) if count else None
    tok.check_vocabulary(facts, data.vocab_size)
    found = corpus.documents()
    divided = divide(found, data.held_out_share) if tail is None else tail.divide(found)
    documents = shuffle(divided, data.shuffle_buffer, data.shuffle_seed)
    with SplitWriter(staging, data.shard_tokens, data.vocab_size, limit) as writer:
        if tail is not None:
            writer.validation.write(tail.tokens, len(tail.marks))
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
        "preprocessing": {
            "empty_documents": "left out",
            "eos": "after every document",
            "special_tokens_in_documents": "encoded as text",
            "tokenizers": tokenizers.__version__,
        },
        "splits": splits,
        "duplicates_dropped": writer.duplicates,
        "exhausted": not writer.full,
    }
    if tail is not None:
        manifest["held_out"] = tail.as_json()
    (staging / MANIFEST_NAME).write_bytes(seal(manifest))


def _make_tokenizer(data: DataConfig, corpus: Corpus, directory: Path, report: Report) -> tok.TokenizerFacts:
    """Train or fetch the tokenizer of a corpus and save it in `directory`."""
    if isinstance(data, StdlibCorpus) or data.tokenizer == "bpe":
        report(f"prepare: training a byte-level BPE of {data.vocab_size:,} entries")
        share = 0.0 if held_out_tokens(data) else data.held_out_share
        texts = training_sample(corpus, share, tok.SAMPLE_BYTES)
        facts = tok.train_bpe(texts, data.vocab_size, directory)
        if facts.entries < data.vocab_size:
            report(f"prepare: the corpus is too small for more than {facts.entries:,} entries")
        return facts
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
            f"{message}: add files, or let blank lines separate the documents of a .txt file: data.separator=''"
        )
    raise PreparationError(f"{message}: for example with data.held_out_share={share:.6f}")
