"""Preparation against bare `tokenizers`: `python -m tiny_llm.benchmark kind=prepare`.

Bare means: as many processes, each with the same tokenizer on one thread, call encode_batch on their share of the
same batches and do nothing with the result. Preparation reads, hashes, shuffles, encodes, checks and writes; its
time includes starting the processes. Both are measured in turns; the best of each counts, since other work on the
machine only slows them down.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from small_cache import text_settings

from tiny_llm.data import tokenizer as tok
from tiny_llm.data.prepare import ensure_cache

DOCUMENT_BYTES = 2200  # about the mean of C4
BATCH_DOCUMENTS = 256


def documents() -> list[str]:
    """Return about 30 MB of text in documents as long as those of C4."""
    text = "".join(
        path.read_text(encoding="utf-8", errors="ignore")
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        if "site-packages" not in path.parts
    )
    return [text[i : i + DOCUMENT_BYTES] for i in range(0, len(text), DOCUMENT_BYTES)]


def encode_bare(directory: Path, batches: list[list[str]], barrier: Any, results: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tok.load(directory)
    barrier.wait()
    started = time.monotonic()
    tokens = 0
    for batch in batches:
        tokens += sum(len(encoding) for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))
    results.put((started, time.monotonic(), tokens))


def bare_tokens_per_second(directory: Path, texts: list[str], workers: int) -> float:
    batches = [texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(texts), BATCH_DOCUMENTS)]
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(workers), spawn.SimpleQueue()
    processes = [
        spawn.Process(target=encode_bare, args=(directory, batches[i::workers], barrier, results))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    measured = [results.get() for _ in processes]
    for process in processes:
        process.join()
    starts, ends, tokens = zip(*measured, strict=True)
    return sum(tokens) / (max(ends) - min(starts))


def prepared_tokens_per_second(directory: Path, corpus: Path, workers: int) -> float:
    lines: list[str] = []
    data = text_settings(directory, corpus, tokenizer=str(directory / "tokenizer"), prepare_workers=workers)
    data = replace(data, vocab_size=32000, batch_documents=BATCH_DOCUMENTS, shuffle_buffer=100000)
    with tempfile.TemporaryDirectory() as place:
        ensure_cache(replace(data, shard_tokens=2**25, cache_dir=f"{place}/cache"), 0, lines.append)
    (line,) = [line for line in lines if "tokens/s" in line][-1:]
    return float(line.split()[-2].replace(",", ""))


def measure(turns: int, workers: int = 2) -> dict[str, Any]:
    """Return the best of both in tokens a second; `python -m tiny_llm.benchmark kind=prepare` calls this."""
    texts = documents()
    bare, prepared = [], []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        tok.train_bpe(texts[::4], 32000, directory / "tokenizer")
        corpus = directory / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for _ in range(turns):
            bare.append(bare_tokens_per_second(directory / "tokenizer", texts, workers))
            prepared.append(prepared_tokens_per_second(directory, corpus, workers))
    return {
        "name": "preparation against bare encode_batch",
        "processes": workers,
        "bare_tokens_per_second": {"best": max(bare), "worst": min(bare)},
        "prepare_tokens_per_second": {"best": max(prepared), "worst": min(prepared)},
        "share": max(prepared) / max(bare),
    }
