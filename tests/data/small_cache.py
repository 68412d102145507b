"""Small corpora and caches for the tests of this room, made in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiny_llm.config.schema import StdlibCorpus, TextCorpus
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.manifest import MANIFEST_NAME, byte_settings, seal
from tiny_llm.data.shards import ShardWriter

SETTINGS: dict[str, Any] = {
    "vocab_size": 400,
    "shuffle_seed": 1,
    "shuffle_buffer": 50,
    "shard_tokens": 4096,
    "prepare_workers": 1,
    "batch_documents": 8,
    "shuffle_group_size": 2,
    "prefetch": True,
    "max_passes": 1,
    "held_out_share": 0.2,
}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "ran",
    "far",
    "away",
    "für",
    "Käse",
    "☃",
    "hills",
]


def text_settings(directory: Path, *paths: Path | str, **changes: Any) -> TextCorpus:
    """Return the settings of a data=text corpus whose cache is directory/cache."""
    values = SETTINGS | {
        "name": "text",
        "cache_dir": str(directory / "cache"),
        "paths": tuple(map(str, paths)),
        "separator": "<|endoftext|>",
        "text_field": "text",
        "tokenizer": "bpe",
    }
    return TextCorpus(**(values | changes))


def stdlib_settings(directory: Path, **changes: Any) -> StdlibCorpus:
    values = SETTINGS | {"name": "stdlib", "cache_dir": str(directory / "cache")}
    return StdlibCorpus(**(values | changes))


def random_documents(count: int, seed: int = 0) -> list[str]:
    """Return documents of random words, among them some with line breaks and letters outside ASCII."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(generator.choice(WORDS, generator.integers(1, 120))).replace("and", "and\n") + f" {number}"
        for number in range(count)
    ]


def write_documents(path: Path, documents: list[str]) -> Path:
    """Write documents into a .txt file, with separator lines between them."""
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def make_cache(
    directory: Path, train: npt.NDArray[Any], validation: npt.NDArray[Any], shard_tokens: int
) -> TokenCache:
    """Write tokens as a cache, without corpus or tokenizer."""
    directory.mkdir(parents=True)
    splits = {}
    for name, tokens in (("train", train), ("validation", validation)):
        writer = ShardWriter(directory, name, shard_tokens, 65536)
        writer.write(tokens.astype(np.uint16), 1)
        splits[name] = writer.finish()
    data = stdlib_settings(directory.parent, cache_dir=str(directory), shard_tokens=shard_tokens)
    manifest = {
        "tokenizer": {"fingerprint": ""},
        "vocab_size": 65536,
        "eos_id": 0,
        "shard_tokens": shard_tokens,
        "settings": byte_settings(data),
        "splits": splits,
        "exhausted": True,
    }
    (directory / MANIFEST_NAME).write_bytes(seal(manifest))
    return TokenCache.open(directory, data)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its bytes."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
