"""Holding out a corpus's last tokens: data.validation_tokens=N.

The last N tokens of all documents, in the order of the corpus, are the validation split; the document at the
cut trains as far as the cut. The manifest keeps marks of the held-out documents, so that preparing a corpus
that has grown holds out the same tokens again, under the same tokenizer: wherever a marked document comes back,
alone or with more text behind it, it stays out of training. A tokenizer that is trained here learns from the
whole corpus, because the cut is known only once it exists.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tiny_llm.config.errors import UserError
from tiny_llm.data.cache import TOKENIZER, TokenCache
from tiny_llm.data.corpora import Corpus, Document, digest
from tiny_llm.data.manifest import Split
from tiny_llm.data.tokenizer import TokenizerFacts, load

START = 32  # characters by which a document is looked up before it is compared as a whole
CHARACTERS_A_TOKEN = 8  # a first guess at how much text N tokens are


class TailError(UserError):
    """A corpus too small to hold out so many tokens."""


@dataclass(frozen=True)
class Mark:
    """What is remembered of a held-out document, less the line breaks at its end."""

    start: str
    characters: int
    sha256: str

    @classmethod
    def of(cls, text: str) -> Mark:
        body = text.rstrip("\n")
        return cls(_digest(body[:START]), len(body), _digest(body))


@dataclass(frozen=True)
class Tail:
    """The held-out tokens and the marks of their documents; `cut` characters of the first one train."""

    tokens: npt.NDArray[np.uint16]
    marks: tuple[Mark, ...]
    cut: int

    def divide(self, documents: Iterable[tuple[Split | None, str]]) -> Iterator[Document]:
        """Yield the training documents: what is left of each after the held-out ones are taken away."""
        known: dict[str, list[Mark]] = {}
        for mark in sorted(self.marks, key=lambda mark: -mark.characters):
            known.setdefault(mark.start, []).append(mark)
        for _, text in documents:
            for part in self._left_of(text, known.get(_digest(text.rstrip("\n")[:START]), [])):
                if part:
                    yield "train", part

    def _left_of(self, text: str, candidates: list[Mark]) -> tuple[str, ...]:
        for mark in candidates:
            body = text[: mark.characters]
            if _digest(body) == mark.sha256:
                head = body[: self.cut] if mark == self.marks[0] else ""
                return head, text[mark.characters :].strip("\n")
        return (text,)

    def as_json(self) -> dict[str, Any]:
        """Return what the manifest keeps; the tokens are the validation split."""
        return {"cut": self.cut, "documents": [list(vars(mark).values()) for mark in self.marks]}


def find_tail(corpus: Corpus, tokenizer: Path, eos_id: int, count: int) -> Tail:
    """Return the corpus's last `count` tokens, encoding no more documents than they take. Raises TailError."""
    encoder, room = load(tokenizer), CHARACTERS_A_TOKEN * count
    while True:
        last, whole = _last_documents(corpus, room)
        tail = _encode_from_the_end(last, encoder, eos_id, count)
        if tail is not None and (tail.cut or len(tail.marks) < len(last) or not whole):
            return tail
        if whole:
            raise TailError(
                f"data.validation_tokens={count} leaves nothing of the corpus to train on; lower it"
            )
        room *= CHARACTERS_A_TOKEN


def _last_documents(corpus: Corpus, room: int) -> tuple[deque[str], bool]:
    """Return the last documents, of `room` characters or a little more, and whether these are all there are."""
    last: deque[str] = deque()
    characters, whole = 0, True
    for _, text in corpus.documents():
        if text:
            last.append(text)
            characters += len(text)
            while characters - len(last[0]) >= room:
                characters -= len(last.popleft())
                whole = False
    return last, whole


def _encode_from_the_end(documents: deque[str], encoder: Tokenizer, eos_id: int, count: int) -> Tail | None:
    """Return the last `count` tokens of documents, None where these are too few."""
    pieces: deque[list[int]] = deque()
    found = 0
    for number, text in enumerate(reversed(documents), 1):
        encoding = encoder.encode(text, add_special_tokens=False)
        pieces.appendleft([*encoding.ids, eos_id])
        found += len(pieces[0])
        if found >= count:
            before = found - count  # tokens of this document that train
            cut = encoding.offsets[before][0] if before < len(encoding.ids) else len(text)
            tokens = np.concatenate([np.array(piece, np.uint16) for piece in pieces])[before:]
            return Tail(tokens, tuple(Mark.of(documents[place]) for place in range(-number, 0)), cut)
    return None


def tail_of(cache: TokenCache) -> Tail:
    """Return the tail that a cache was prepared with."""
    kept = cache.manifest["held_out"]
    marks = tuple(Mark(*mark) for mark in kept["documents"])
    return Tail(cache.read("validation", 0, cache.validation_tokens), marks, kept["cut"])


def copy_tokenizer(cache: TokenCache, directory: Path) -> TokenizerFacts:
    """Copy the tokenizer that the held-out tokens were made with."""
    shutil.copytree(cache.directory / TOKENIZER, directory)
    return TokenizerFacts(**cache.manifest["tokenizer"])


def _digest(text: str) -> str:
    return digest(text).hex()[:32]
