"""manifest.json: what the bytes of a token cache are and what made them.

It holds the corpus with its resolved revision, the tokenizer with its fingerprint, vocabulary and EOS id,
the settings that decide the bytes, each split's documents, tokens and shards, and two digests: `identity`
over the content, which runs record and compare, and `manifest_sha256` over the page itself, which finds
damage. It holds no time, host or path of this machine: the same corpus and settings give the same page.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from tiny_llm.config.schema import DataConfig, HubCorpus

Split = Literal["train", "validation"]

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
FREE_SETTINGS = frozenset(  # they change where, how fast or how much is prepared and read, not one byte of it
    {
        "cache_dir",
        "prepare_workers",
        "batch_documents",
        "shuffle_group_size",
        "prefetch",
        "max_passes",
        "attempts",
    }
)


class ManifestError(ValueError):
    """A manifest that cannot be read or is not the one that preparation wrote."""


def byte_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings that decide the bytes of a cache, as JSON gives them back."""
    settings = {key: value for key, value in dataclasses.asdict(data).items() if key not in FREE_SETTINGS}
    if isinstance(data, HubCorpus) and data.validation_split is not None:
        del settings["held_out_share"]
    if not isinstance(data, HubCorpus):
        del settings["held_out_share" if data.validation_tokens else "validation_tokens"]
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def held_out_tokens(data: DataConfig) -> int | None:
    """Return how many of the corpus's last tokens are held out; None where documents are."""
    return None if isinstance(data, HubCorpus) else data.validation_tokens


def seal(manifest: dict[str, Any]) -> bytes:
    """Return the page of a manifest with both digests added."""
    manifest = {**manifest, "format_version": FORMAT_VERSION}
    manifest["identity"] = content_identity(manifest)
    manifest["manifest_sha256"] = _sha256(manifest)
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def content_identity(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a cache's content, through the SHA-256 of its tokenizer and shards."""
    shards = [
        [split, shard["tokens"], shard["sha256"]]
        for split in ("train", "validation")
        for shard in manifest["splits"][split]["shards"]
    ]
    return _sha256(
        {
            "vocab_size": manifest["vocab_size"],
            "eos_id": manifest["eos_id"],
            "tokenizer": manifest["tokenizer"]["fingerprint"],
            "shards": shards,
        }
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a page. Raises ManifestError when it is damaged or of another format."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        version, stated = manifest["format_version"], manifest.pop("manifest_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ManifestError(f"damaged cache: {path} is not the JSON that preparation wrote") from None
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path} has format version {version!r}; this program reads version {FORMAT_VERSION}"
        )
    if stated != _sha256(manifest):
        raise ManifestError(f"damaged cache: {path} was changed after preparation wrote it")
    return manifest


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
