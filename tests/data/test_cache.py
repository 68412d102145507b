"""A cache opens at once when it fits and is whole; otherwise reason, place and way out are named."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_cache import make_cache, random_documents, stdlib_settings, text_settings, write_documents

from tiny_llm.config.schema import TextCorpus
from tiny_llm.data.cache import CacheError, DamagedCacheError, TokenCache
from tiny_llm.data.manifest import MANIFEST_NAME
from tiny_llm.data.prepare import ensure_cache


@pytest.fixture
def data(tmp_path: Path) -> TextCorpus:
    corpus = write_documents(tmp_path / "corpus.txt", random_documents(200))
    return text_settings(tmp_path, corpus, shard_tokens=3000)


@pytest.fixture
def cache(data: TextCorpus) -> TokenCache:
    return ensure_cache(data, 0, lambda line: None)


def test_reading_crosses_shards(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 65536, 100)
    cache = make_cache(tmp_path / "cache", tokens, np.arange(5), 7)
    for _ in range(200):
        start, stop = sorted(int(edge) for edge in generator.integers(0, 101, 2))
        assert cache.read("train", start, stop).tolist() == tokens[start:stop].tolist()


def test_shards_are_little_endian_and_full_but_the_last(cache: TokenCache, data: TextCorpus) -> None:
    tokens = cache.read("train", 0, cache.train_tokens)
    shards = cache.shards("train")
    assert len(shards) > 3
    assert {shard["tokens"] for shard in shards[:-1]} == {3000}
    content = b"".join((cache.directory / shard["file"]).read_bytes() for shard in shards)
    assert content == b"".join(int(token).to_bytes(2, "little") for token in tokens)
    assert [shard["largest_id"] for shard in shards] == [
        int(tokens[first : first + 3000].max()) for first in range(0, len(tokens), 3000)
    ]


def test_the_manifest_says_what_the_bytes_are_and_what_made_them(cache: TokenCache) -> None:
    manifest = json.loads((cache.directory / MANIFEST_NAME).read_text())
    assert {
        "format_version",
        "corpus",
        "tokenizer",
        "vocab_size",
        "eos_id",
        "preprocessing",
        "identity",
    } <= set(manifest)
    assert {"fingerprint", "revision", "source"} <= set(manifest["tokenizer"])
    assert set(manifest["splits"]["train"]["shards"][0]) == {
        "file",
        "tokens",
        "bytes",
        "sha256",
        "largest_id",
    }
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == 200


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shuffle_seed": 2}, r"data\.shuffle_seed \(cache: 1, now: 2\)"),
        ({"held_out_share": 0.1}, r"data\.held_out_share \(cache: 0\.2, now: 0\.1\)"),
        ({"tokenizer": "gpt2"}, r"data\.tokenizer \(cache: 'bpe', now: 'gpt2'\)"),
        ({"vocab_size": 500, "shard_tokens": 9}, r"vocab_size \(cache: 400, now: 500\).*shard_tokens"),
    ],
)
def test_settings_that_decide_the_bytes_are_compared(
    cache: TokenCache, data: TextCorpus, change: dict[str, object], named: str
) -> None:
    with pytest.raises(CacheError, match=named) as refused:
        ensure_cache(replace(data, **change), 0, lambda line: None)
    assert "rm -r" in str(refused.value)
    assert "python -m tiny_llm.prepare data=text" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_that_do_not_decide_the_bytes_are_free(cache: TokenCache, data: TextCorpus) -> None:
    free = replace(
        data, prepare_workers=7, batch_documents=1, prefetch=False, max_passes=9, shuffle_group_size=5
    )
    assert ensure_cache(free, 0, lambda line: None).identity == cache.identity


def test_a_shard_of_another_size_is_named_at_the_start(cache: TokenCache, data: TextCorpus) -> None:
    shard = cache.directory / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DamagedCacheError, match=r"train-00001\.bin has 5,998 bytes, the manifest 6,000"):
        ensure_cache(data, 0, lambda line: None)
    shard.unlink()
    with pytest.raises(DamagedCacheError, match=r"train-00001\.bin is missing"):
        ensure_cache(data, 0, lambda line: None)


@pytest.mark.parametrize("name", ["train-00002.bin", "validation-00000.bin", "tokenizer/tokenizer.json"])
def test_one_flipped_bit_is_named_by_verify(cache: TokenCache, name: str) -> None:
    cache.verify()
    path = cache.directory / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedCacheError, match=name):
        cache.verify()


def test_a_flipped_bit_of_validation_or_tokenizer_is_named_when_it_is_used(cache: TokenCache) -> None:
    cache.read("validation", 0, 10)
    cache.load_tokenizer()
    for name, use in (
        ("validation-00000.bin", lambda: cache.read("validation", 3, 4)),
        ("tokenizer/tokenizer.json", cache.load_tokenizer),
    ):
        path = cache.directory / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(0, 1))  # two writes of one tick have one time
        with pytest.raises(DamagedCacheError, match=rf"damaged cache: .*{Path(name).name} has SHA-256"):
            use()


@pytest.mark.parametrize("damage", ["truncated", "empty", "a number changed", "another version", "not UTF-8"])
def test_a_damaged_manifest_is_named(cache: TokenCache, data: TextCorpus, damage: str) -> None:
    path = cache.directory / MANIFEST_NAME
    page = path.read_bytes()
    path.write_bytes(
        {
            "truncated": page[:-40],
            "empty": b"",
            "a number changed": page.replace(b'"documents": 1', b'"documents": 2'),
            "another version": page.replace(b'"format_version": 1', b'"format_version": 9'),
            "not UTF-8": b"\xff" + page,
        }[damage]
    )
    with pytest.raises(DamagedCacheError, match="manifest") as refused:
        ensure_cache(data, 0, lambda line: None)
    assert "rm -r" in str(refused.value)


def test_a_shard_cut_short_after_opening_is_named(cache: TokenCache) -> None:
    (cache.directory / "train-00001.bin").write_bytes(b"")
    with pytest.raises(DamagedCacheError, match=r"train-00001\.bin"):
        cache.read("train", 2990, 3010)


def test_opening_takes_milliseconds_however_many_shards(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", np.arange(9000), np.arange(5), 30)
    started = time.perf_counter()
    TokenCache.open(tmp_path / "cache", stdlib_settings(tmp_path, shard_tokens=30))
    assert time.perf_counter() - started < 1
