"""Encoding keeps the order, adds an EOS to every document and never runs far ahead of its reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_cache import random_documents

from tiny_llm.data import encoding
from tiny_llm.data.encoding import Batch, batches, encode, encode_in_order
from tiny_llm.data.tokenizer import load, train_bpe


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    train_bpe(random_documents(50), 400, tmp_path)
    return tmp_path


def test_tokens_are_those_of_each_document_alone_and_an_eos(directory: Path) -> None:
    texts = ["", "x", *random_documents(40)]
    encoded = encode(load(directory), 7, texts)
    plain = load(directory)
    expected = [[*plain.encode(text, add_special_tokens=False).ids, 7] for text in texts]
    assert encoded.tokens.tolist() == [token for document in expected for token in document]
    assert encoded.lengths.tolist() == [len(document) for document in expected]


def test_batches_hold_so_many_documents_or_so_many_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 100)
    documents = [("train", "x" * length) for length in (1, 1, 1, 1, 150, 60, 60, 1)]
    grouped = list(batches(documents, 3))
    assert [[len(text) for text in batch.texts] for batch in grouped] == [[1, 1, 1], [1, 150], [60, 60], [1]]
    assert all(batch.splits == ["train"] * len(batch.texts) for batch in grouped)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_come_back_in_order_and_at_most_two_a_worker_are_under_way(
    directory: Path, workers: int
) -> None:
    taken = 0

    def source() -> Iterator[Batch]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield Batch([f"{number} " * (200 if number % 7 == 0 else 1)], ["train"])

    stream = encode_in_order(source(), directory, 0, workers)
    for number in range(20):
        batch, encoded = next(stream)
        assert batch.texts[0].split()[0] == str(number)
        assert load(directory).decode(encoded.tokens.tolist()) == batch.texts[0]
        assert taken - number <= 2 * workers
    stream.close()
    assert taken <= 20 + 2 * workers


def test_threads_of_this_process_are_off_only_while_it_encodes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(*arguments: object) -> object:
        seen.append(os.environ.get("TOKENIZERS_PARALLELISM"))
        return encode(*arguments)  # type: ignore[arg-type]

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(encoding, "encode", watched)
    for _ in encode_in_order(iter([Batch(["a"], ["train"])] * 2), directory, 0, 1):
        assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert seen == ["false", "false"]
