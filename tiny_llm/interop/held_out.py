"""Held-out text that models with different tokenizers can all be measured on: documents, and how many bytes.

In flow a token cache, whose validation split is turned back into text, or files as data=text reads them; out flow
documents in their order. `evaluate_text` gives a model's loss on them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tiny_llm.config.compose import compose
from tiny_llm.config.schema import TextCorpus
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.manifest import MANIFEST_NAME
from tiny_llm.data.text import TextFiles
from tiny_llm.interop.opened import OpenModel
from tiny_llm.interop.tensors import ExchangeError
from tiny_llm.models.decoder import loss_sums
from tiny_llm.models.operations import IGNORED

TOKENS_AT_ONCE = 8192
PROMPTS, PROMPT_CHARACTERS = 3, 48


@dataclass(frozen=True)
class HeldOut:
    """Documents to measure on; bytes are those of their UTF-8 text, `sha256` is over length and text of each."""

    source: str
    documents: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(len(text.encode()) for text in self.documents)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for text in self.documents:
            digest.update(len(text.encode()).to_bytes(8, "big") + text.encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class TextLoss:
    """A summed cross-entropy in nats over `targets` tokens that spell `bytes` bytes of text.

    altered: documents that the tokenizer does not give back as they were; what it drops costs the model nothing.
    """

    nats: float
    targets: int
    bytes: int
    altered: int

    @property
    def loss(self) -> float:
        """Nats a token: comparable between models of one tokenizer alone."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def read_held_out(data: str, most_bytes: int | None) -> HeldOut:
    """Return the documents that `data` names: a token cache's directory, or a glob of text files.

    most_bytes: stop before the document that would exceed it; the first one is always taken.
    """
    path, size = Path(data), 0
    kept: list[str] = []
    documents = _cached(path) if (path / MANIFEST_NAME).is_file() else _files(data)
    for text in documents:
        size += len(text.encode())
        if kept and most_bytes is not None and size > most_bytes:
            break
        kept.append(text)
    if not kept:
        raise ExchangeError(f"data={data} has no held-out document")
    return HeldOut(data, tuple(kept))


def default_prompts(held_out: HeldOut) -> tuple[str, ...]:
    """Return the beginnings of the first held-out documents."""
    return tuple(text[:PROMPT_CHARACTERS] for text in held_out.documents[:PROMPTS])


def _cached(directory: Path) -> Iterator[str]:
    """Yield the validation documents of a cache, decoded."""
    cache = TokenCache.read_only(directory)
    tokenizer, rest = cache.load_tokenizer(), np.zeros(0, np.uint16)
    for start in range(0, cache.validation_tokens, 2**20):
        tokens = cache.read("validation", start, min(start + 2**20, cache.validation_tokens))
        *whole, rest = np.split(
            tokens := np.concatenate((rest, tokens)), np.flatnonzero(tokens == cache.eos_id) + 1
        )
        for document in whole:
            if len(document) > 1:
                yield tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False)


def _files(pattern: str) -> Iterator[str]:
    """Yield the documents of .txt, .jsonl, .jsonl.gz and .parquet files."""
    settings = compose(["data=text"]).config().data
    assert isinstance(settings, TextCorpus)
    return (text for _, text in TextFiles(replace(settings, paths=(pattern,))).documents() if text)


@torch.no_grad()
def evaluate_text(opened: OpenModel, held_out: HeldOut, block: int) -> TextLoss:
    """Return the loss in fp32 of one model on documents.

    The stream is the EOS, then each document and its EOS; every token after the first is a target. It is cut into
    consecutive blocks of `block` targets, each predicted from its own block's tokens alone.
    """
    encodings = opened.tokenizer.encode_batch_fast(list(held_out.documents), add_special_tokens=False)
    decoded = opened.tokenizer.decode_batch([one.ids for one in encodings], skip_special_tokens=False)
    altered = sum(text != again for text, again in zip(held_out.documents, decoded, strict=True))
    stream = [opened.eos_id]
    for encoding in encodings:
        stream += [*encoding.ids, opened.eos_id]
    targets = len(stream) - 1
    padded = torch.full((-(-targets // block) * block + 1,), IGNORED, dtype=torch.int64)
    padded[: len(stream)] = torch.tensor(stream)
    inputs_BT = padded[:-1].clamp_min(0).view(-1, block)
    targets_BT = padded[1:].view(-1, block)
    rows, nats = max(1, TOKENS_AT_ONCE // block), 0.0
    for start in range(0, len(inputs_BT), rows):
        inputs, counted = (part[start : start + rows].to(opened.device) for part in (inputs_BT, targets_BT))
        nats += float(loss_sums(opened.model, opened.weights, inputs, counted, torch.float32))
    return TextLoss(nats, targets, held_out.bytes, altered)
