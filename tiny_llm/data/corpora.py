"""Corpora: where documents come from, in an order that never changes, and which split each belongs to.

A `Corpus` gives (split, text) pairs; split is None where the corpus has no official validation split and
documents are held out by content. `divide` settles the split of each document, and `shuffle` mixes the
training documents within a bounded buffer; validation documents keep the order of the source.
"""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from tiny_llm.config.errors import UserError, nearest
from tiny_llm.config.schema import DataConfig, HubCorpus, StdlibCorpus
from tiny_llm.data.manifest import Split

Report = Callable[[str], None]
Document = tuple[Split | Literal["duplicate"], str]
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class CorpusError(UserError):
    """A corpus that cannot be read: the message names the file and the place in it."""


def missing_field(place: str, field: str, present: list[str]) -> CorpusError:
    """Return the error for a record without the text field."""
    fields = ", ".join(present) or "(none)"
    return CorpusError(
        f"{place}: no field '{field}'; set data.text_field to one of {fields}{nearest(field, present)}"
    )


class Corpus(Protocol):
    """A source of documents."""

    revision: str | None
    """The commit that the documents come from, where there is one."""

    def sources(self) -> dict[str, Any]:
        """Return what the manifest records of where the documents come from."""
        ...

    def estimated_bytes(self) -> int:
        """Return about how much text there is."""
        ...

    def documents(self) -> Iterator[tuple[Split | None, str]]:
        """Yield every document, official validation first. Raises CorpusError."""
        ...


def open_corpus(data: DataConfig, report: Report) -> Corpus:
    """Return the corpus that the settings name; a Hub corpus resolves its revision here."""
    if isinstance(data, StdlibCorpus):
        return StandardLibrary(Path(sysconfig.get_path("stdlib")))
    if isinstance(data, HubCorpus):
        from tiny_llm.data.hub import HubDataset  # imports `datasets`, which takes seconds

        return HubDataset(data, report)
    from tiny_llm.data.text import TextFiles

    return TextFiles(data)


class StandardLibrary:
    """The .py files of a standard library, a document each, without its tests and installed packages."""

    revision: str | None = None

    def __init__(self, root: Path) -> None:
        self.root = root
        found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
        self.files = [path for name, path in sorted(found) if not LEFT_OUT & set(name.parts)]
        if not self.files:
            raise CorpusError(f"data=stdlib: no .py files in {root}; use data=text with data.paths=[...]")

    def sources(self) -> dict[str, Any]:
        named = ((path.relative_to(self.root).as_posix(), path) for path in self.files)
        return listing(named) | {"python": platform.python_version()}

    def estimated_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[tuple[Split | None, str]]:
        for path in self.files:
            try:
                with tokenize.open(path) as file:
                    yield None, file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # kept by some distributions to test bad encodings


def listing(files: Iterable[tuple[str, Path]]) -> dict[str, Any]:
    """Return number, bytes and a digest of names and sizes of files, by which growth is noticed."""
    sizes = [(name, path.stat().st_size) for name, path in files]
    return {
        "files": len(sizes),
        "bytes": sum(size for _, size in sizes),
        "listing_sha256": hashlib.sha256(repr(sizes).encode()).hexdigest(),
    }


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is validation: its SHA-256, as a fraction of all, is under the share.

    It depends on the document alone, so the answer never changes however the corpus grows, and copies of a
    document are always on one side.
    """
    return fraction(digest(text)[:8]) < share


def fraction(part: bytes) -> float:
    """Return eight bytes of a digest as a number in [0, 1)."""
    return (int.from_bytes(part, "big") >> 11) / 2**53


def smallest_share(corpus: Corpus) -> float | None:
    """Return a held-out share that puts documents into both splits, as few as possible into validation."""
    fractions = sorted({fraction(digest(text)[:8]) for _, text in corpus.documents() if text})
    return None if len(fractions) < 2 else (fractions[0] + fractions[1]) / 2


def divide(documents: Iterable[tuple[Split | None, str]], held_out_share: float) -> Iterator[Document]:
    """Settle the split of each document; empty ones are left out.

    A training document identical to one of an official validation split becomes an empty "duplicate", which
    is counted further down and written nowhere.
    """
    validation: set[bytes] = set()
    for split, text in documents:
        if not text:
            continue
        if split is None:
            yield "validation" if is_held_out(text, held_out_share) else "train", text
        elif split == "validation":
            validation.add(digest(text))
            yield split, text
        elif validation and digest(text) in validation:
            yield "duplicate", ""
        else:
            yield split, text


def training_sample(corpus: Corpus, held_out_share: float, size: int) -> Iterator[str]:
    """Yield training documents of about `size` bytes, spread over the whole corpus: chosen by content."""
    share = min(1.0, size / max(1, corpus.estimated_bytes()))
    for split, text in divide(corpus.documents(), held_out_share):
        if split == "train" and (share == 1 or fraction(digest(text)[8:16]) < share):
            yield text


def shuffle(documents: Iterable[Document], buffer_size: int, seed: int) -> Iterator[Document]:
    """Shuffle training documents within a buffer; validation documents pass through in order.

    A longer prefix of the stream begins with the shorter one, so a larger cache extends a smaller one.
    """
    generator = random.Random(seed)
    buffer: list[Document] = []
    for document in documents:
        if document[0] != "train":
            yield document
        elif len(buffer) < buffer_size:
            buffer.append(document)
        else:
            place = generator.randrange(buffer_size)
            buffer[place], document = document, buffer[place]
            yield document
    generator.shuffle(buffer)
    yield from buffer
