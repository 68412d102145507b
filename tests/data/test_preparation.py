"""Preparation gives the bytes that its definition gives, whatever the workers, batches and capacity."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cache import SETTINGS, files_of, random_documents, stdlib_settings, text_settings, write_documents

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import HubCorpus
from tiny_llm.data import pipeline
from tiny_llm.data import tokenizer as tok
from tiny_llm.data.cache import CacheError, DamagedCacheError
from tiny_llm.data.encoding import Batch, Encoded
from tiny_llm.data.prepare import capacity, ensure_cache, prepare, verify
from tiny_llm.data.shards import ShardWriter, SplitWriter, TokenRangeError


def silent(line: str) -> None:
    pass


opened: list[str] = []
"""The revisions at which the stand-in for the Hub has been opened."""


class ListCorpus:
    """A corpus in memory, in place of one of the Hub."""

    revision = "0123abc"

    def __init__(self, documents: list[tuple[Any, str]]) -> None:
        self._documents = documents

    def sources(self) -> dict[str, Any]:
        return {}

    def estimated_bytes(self) -> int:
        return 1

    def documents(self) -> Iterator[tuple[Any, str]]:
        return iter(self._documents)


def hub_settings(directory: Path, **changes: Any) -> HubCorpus:
    values = SETTINGS | {
        "name": "c4", "cache_dir": str(directory / "cache"), "dataset": "d", "subset": None, "revision": "r",
        "train_split": "train", "validation_split": None, "text_field": "text", "tokenizer": "t",
        "tokenizer_revision": "main", "attempts": 2, "shard_tokens": 500,
    }  # fmt: skip
    return HubCorpus(**(values | changes))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Stand in for the Hub: the documents of the returned list, and a BPE trained on them."""
    documents: list[tuple[Any, str]] = [(None, text) for text in random_documents(300)]

    def make_tokenizer(data: Any, corpus: Any, directory: Path, report: Any) -> tok.TokenizerFacts:
        return tok.train_bpe(random_documents(50), 400, directory)

    def open_corpus(data: HubCorpus, report: Any) -> ListCorpus:
        assert data.revision in ("r", ListCorpus.revision)
        opened.append(data.revision)
        return ListCorpus(documents)

    opened.clear()
    monkeypatch.setattr(pipeline, "open_corpus", open_corpus)
    monkeypatch.setattr(pipeline, "_make_tokenizer", make_tokenizer)
    return documents


def test_a_cache_holds_what_its_definition_says(tmp_path: Path) -> None:
    documents = random_documents(150)
    data = text_settings(tmp_path, write_documents(tmp_path / "a.txt", documents), shuffle_buffer=20)
    cache = ensure_cache(data, 0, silent)
    tokenizer = cache.load_tokenizer()

    def tokens_of(texts: list[str]) -> list[int]:
        ids: list[int] = []
        for text in texts:
            ids += [*tokenizer.encode(text, add_special_tokens=False).ids, cache.eos_id]
        return ids

    train, validation = [], []
    for text in documents:
        first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        (validation if first < 0.2 * 2**64 else train).append(text)
    generator, buffer, shuffled = random.Random(1), [], []
    for text in train:
        if len(buffer) < 20:
            buffer.append(text)
            continue
        place = generator.randrange(20)
        shuffled.append(buffer[place])
        buffer[place] = text
    generator.shuffle(buffer)
    assert cache.read("train", 0, cache.train_tokens).tolist() == tokens_of(shuffled + buffer)
    assert cache.read("validation", 0, cache.validation_tokens).tolist() == tokens_of(validation)


def test_bytes_are_the_same_for_every_number_of_workers_and_batch_size(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "a.txt", random_documents(150))
    caches = [
        ensure_cache(
            text_settings(tmp_path / name, corpus, prepare_workers=workers, batch_documents=size), 0, silent
        )
        for name, workers, size in (("one", 1, 8), ("two", 2, 8), ("three", 3, 8), ("more", 2, 37))
    ]
    expected = files_of(caches[0].directory)
    assert len(expected) > 4
    for cache in caches[1:]:
        assert files_of(cache.directory) == expected


@pytest.mark.parametrize("validation_split", [None, "validation"])
def test_a_stopped_cache_is_the_same_for_every_number_of_workers_and_batch_size(
    tmp_path: Path, hub: list[tuple[Any, str]], validation_split: str | None
) -> None:
    if validation_split:
        held_out = [("validation", text) for _, text in hub[:30]]
        hub[:] = held_out + [("train", text) for _, text in hub + hub[:30] + hub]
    kept = []
    for workers, size in ((1, 4), (2, 4), (3, 50)):
        directory = tmp_path / f"{workers}"
        data = hub_settings(
            directory, prepare_workers=workers, batch_documents=size, validation_split=validation_split
        )
        cache = ensure_cache(data, 2500, silent)
        assert cache.train_tokens == 3 * 1000 + 1
        assert not cache.exhausted
        kept.append(files_of(cache.directory))
    assert kept[0] == kept[1] == kept[2]
    assert (cache.manifest["duplicates_dropped"] > 0) == (validation_split is not None)


def test_validation_stays_in_order_and_its_copies_never_train(
    tmp_path: Path, hub: list[tuple[Any, str]]
) -> None:
    texts = [text for _, text in hub]
    hub[:] = [("validation", text) for text in texts[:20]] + [("train", text) for text in texts[10:]]
    lines: list[str] = []
    cache = ensure_cache(hub_settings(tmp_path, validation_split="validation"), 10**9, lines.append)
    tokenizer = cache.load_tokenizer()
    found = {
        split: tokenizer.decode(cache.read(split, 0, cache.tokens(split)), skip_special_tokens=False).split(
            "<|endoftext|>"
        )[:-1]
        for split in ("train", "validation")
    }
    assert found["validation"] == texts[:20]
    assert sorted(found["train"]) == sorted(texts[20:])
    assert any("10 training documents dropped as duplicates of validation" in line for line in lines)
    assert cache.exhausted


def test_a_larger_cache_extends_a_smaller_one(tmp_path: Path, hub: list[tuple[Any, str]]) -> None:
    small = ensure_cache(hub_settings(tmp_path / "a"), 1, silent)
    large = ensure_cache(hub_settings(tmp_path / "b"), 4000, silent)
    assert small.train_tokens == 1001
    assert (large.read("train", 0, 1001) == small.read("train", 0, 1001)).all()


@pytest.mark.parametrize(
    ("targets", "passes", "expected"),
    [(0, 1, 1001), (1, 1, 1001), (1000, 1, 1001), (1001, 1, 2001), (4001, 4, 2001), (4000, 4, 1001)],
)
def test_capacity_is_whole_groups_and_one_token(
    tmp_path: Path, targets: int, passes: int, expected: int
) -> None:
    assert capacity(hub_settings(tmp_path, max_passes=passes), targets) == expected
    assert capacity(stdlib_settings(tmp_path), targets) is None


def test_training_refuses_too_small_a_cache_and_prepare_enlarges_it(
    tmp_path: Path, hub: list[tuple[Any, str]]
) -> None:
    data = hub_settings(tmp_path)
    small = ensure_cache(data, 900, silent)
    assert ensure_cache(data, 1000, silent).identity == small.identity
    assert ensure_cache(replace(data, max_passes=2), 2000, silent).identity == small.identity
    with pytest.raises(
        CacheError, match=r"1,001 training tokens.*needs 1,001.*python -m tiny_llm\.prepare data=c4"
    ):
        ensure_cache(data, 1001, silent)
    large = prepare(data, 1001, silent)
    assert large.train_tokens == 2001
    assert opened == ["r", ListCorpus.revision], "a larger cache extends the same commit"
    assert ensure_cache(data, 1001, silent).identity == large.identity
    assert prepare(data, 5, silent).identity == large.identity
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_prepare_verifies_an_existing_cache(tmp_path: Path) -> None:
    data = text_settings(tmp_path, write_documents(tmp_path / "a.txt", random_documents(80)))
    cache = prepare(data, 0, silent)
    lines: list[str] = []
    prepare(data, 0, lines.append)
    assert any("every checksum right" in line for line in lines)
    path = cache.directory / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    for check in (lambda: prepare(data, 0, silent), lambda: verify(data, silent)):
        with pytest.raises(DamagedCacheError, match=r"train-00000\.bin"):
            check()


def test_prepare_follows_a_corpus_that_has_grown_while_training_does_not(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.txt", random_documents(80))
    data = text_settings(tmp_path, tmp_path / "*.txt")
    before = prepare(data, 0, silent)
    write_documents(tmp_path / "b.txt", random_documents(40, seed=5))
    assert ensure_cache(data, 0, silent).identity == before.identity
    after = prepare(data, 0, silent)
    assert after.train_tokens > before.train_tokens
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    assert prepare(data, 0, silent).identity == after.identity


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (["only one"], r"0 validation documents.*data\.separator"),
        (["one", "two", "three"], r"3 train documents and 0 validation.*with data\.held_out_share=0\.\d+"),
    ],
)
def test_a_corpus_that_leaves_a_split_empty_is_refused_with_what_helps(
    tmp_path: Path, documents: list[str], message: str
) -> None:
    data = text_settings(tmp_path, write_documents(tmp_path / "a.txt", documents), held_out_share=0.001)
    with pytest.raises(UserError, match=message) as refused:
        ensure_cache(data, 0, silent)
    assert not Path(data.cache_dir).exists()
    if "with data.held_out_share=" in str(refused.value):
        share = float(str(refused.value).rpartition("=")[2])
        assert ensure_cache(replace(data, held_out_share=share), 0, silent).validation_tokens > 1


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    data = text_settings(tmp_path, write_documents(tmp_path / "a.txt", random_documents(80)))
    cache = Path(data.cache_dir)
    cache.mkdir()
    (cache / "thesis.tex").write_text("years of work")
    with pytest.raises(CacheError, match="holds other files"):
        ensure_cache(data, 0, silent)
    assert files_of(cache) == {"thesis.tex": b"years of work"}
    (cache / "thesis.tex").unlink()
    assert ensure_cache(data, 0, silent).train_tokens > 0


def test_an_error_in_the_corpus_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some words"}\n' * 200 + "{\n")
    for workers in (1, 2):
        tokenizer = tok.train_bpe(random_documents(20), 300, tmp_path / "t")
        assert tokenizer.entries == 300
        data = text_settings(tmp_path / "x", path, tokenizer=str(tmp_path / "t"), prepare_workers=workers)
        with pytest.raises(UserError, match=r"a\.jsonl, line 201"):
            ensure_cache(data, 0, silent)
        assert [entry.name for entry in (tmp_path / "x").iterdir()] == []


def test_progress_and_totals_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "REPORT_SECONDS", 0.0)
    lines: list[str] = []
    data = text_settings(tmp_path, write_documents(tmp_path / "a.txt", random_documents(100)))
    cache = ensure_cache(data, 0, lines.append)
    progress = [line for line in lines if "tokens/s" in line]
    assert len(progress) > 10
    assert f"100 documents, {cache.train_tokens + cache.validation_tokens:,} tokens" in progress[-1]


def test_an_id_outside_the_vocabulary_stops_the_writer(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 10, vocab_size=50)
    writer.write(np.arange(40, 50).astype(np.uint16), 1)
    with pytest.raises(TokenRangeError, match=r"train-00001\.bin: token id 50.*data\.vocab_size=51"):
        writer.write(np.array([3, 50], np.uint16), 1)
    writer.close()


@pytest.mark.parametrize("trial", range(10))
def test_the_writer_stops_at_the_very_token(tmp_path: Path, trial: int) -> None:
    generator = np.random.default_rng(trial)
    count, limit = 60, int(generator.integers(1, 200))
    lengths = generator.integers(1, 12, count)
    splits = [
        str(split)
        for split in generator.choice(["train", "validation", "duplicate"], count, p=[0.7, 0.2, 0.1])
    ]
    documents = [list(generator.integers(0, 99, length)) for length in lengths]
    train: list[int] = []
    validation: list[int] = []
    for split, document in zip(splits, documents, strict=True):
        (train if split == "train" else validation if split == "validation" else []).extend(document)
        if len(train) >= limit:
            del train[limit:]
            break
    with SplitWriter(tmp_path, 16, 99, limit) as writer:
        for first in range(0, count, 7):
            chosen = documents[first : first + 7]
            tokens = np.concatenate(chosen).astype(np.uint16)
            writer.write(
                Batch([""] * len(chosen), splits[first : first + 7]),
                Encoded(lengths[first : first + 7], tokens),
            )
            if writer.full:
                break
        writer.finish()
    assert (
        np.concatenate([np.fromfile(path, "<u2") for path in sorted(tmp_path.glob("train*"))]).tolist()
        == train
    )
    written = [np.fromfile(path, "<u2") for path in sorted(tmp_path.glob("validation*"))]
    assert np.concatenate([np.array([], int), *written]).tolist() == validation


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "a.txt", random_documents(80))
    data = text_settings(tmp_path, corpus, cache_dir=str(corpus / "cache"))
    with pytest.raises(
        UserError, match=r"a\.txt/cache: (File exists|Not a directory).*data\.cache_dir=DIRECTORY"
    ):
        ensure_cache(data, 0, silent)
