"""The user's own files as a corpus: .txt, .jsonl, .jsonl.gz and .parquet, in the order of their sorted
paths.

A .txt file is one document, or several separated by lines that equal data.separator; a record of the other
formats is one, its text in the field data.text_field. All text is UTF-8. In flow globs; out flow documents,
whose split is settled by content. Whatever cannot be read is refused with the file and the line (the row in
.parquet).
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tiny_llm.config.schema import TextCorpus
from tiny_llm.data.corpora import CorpusError, listing, missing_field
from tiny_llm.data.manifest import Split

LARGEST_DOCUMENT = 100_000_000  # bytes; encoding takes some 50 times as much memory
COMPRESSION = 4  # about what gzip and Parquet save on text


class TextFiles:
    """The files that the globs of data.paths name."""

    revision: str | None = None

    def __init__(self, data: TextCorpus) -> None:
        self.field = data.text_field
        self.separator = data.separator
        self.files = _find(data.paths)
        self._readers = [_reader(self, path) for path in self.files]

    def sources(self) -> dict[str, Any]:
        return listing((path.name, path) for path in self.files)

    def estimated_bytes(self) -> int:
        return sum(
            path.stat().st_size * (COMPRESSION if path.suffix in (".gz", ".parquet") else 1)
            for path in self.files
        )

    def documents(self) -> Iterator[tuple[Split | None, str]]:
        for path, read in zip(self.files, self._readers, strict=True):
            try:
                for text in read(path):
                    yield None, text
            except OSError as error:
                raise CorpusError(f"{path}: cannot read it: {error.strerror or error}") from None

    def read_plain(self, path: Path) -> Iterator[str]:
        """Yield the documents of a .txt file, which separator lines end."""
        parts: list[str] = []
        size, whole = 0, True
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = _decode(raw, path, number)
                if line.strip("\r\n") == self.separator:
                    yield "".join(parts).strip("\n")
                    parts, size, whole = [], 0, False
                    continue
                parts.append(line.replace("\r\n", "\n"))
                size += len(raw)
                if size > LARGEST_DOCUMENT:
                    raise CorpusError(
                        f"{path}, line {number}: a document of more than {LARGEST_DOCUMENT:,} bytes; "
                        f"separate documents by lines of data.separator={self.separator!r}, or set "
                        "data.separator='' where blank lines do"
                    )
        text = "".join(parts)
        yield text if whole else text.strip("\n")

    def read_json_lines(self, path: Path) -> Iterator[str]:
        """Yield the text of each record of a .jsonl or .jsonl.gz file."""
        number = 0
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            try:
                for number, raw in enumerate(file, 1):
                    if line := _decode(raw, path, number).strip():
                        yield self._text_of(_parse(line, path, number), f"{path}, line {number}")
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise CorpusError(f"{path}, after line {number}: damaged gzip data: {error}") from None

    def read_parquet(self, path: Path) -> Iterator[str]:
        """Yield the text column of a Parquet file, row by row."""
        import pyarrow
        from pyarrow import parquet

        row = 0
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                if self.field not in names:
                    raise missing_field(str(path), self.field, names)
                for batch in file.iter_batches(batch_size=1024, columns=[self.field]):
                    for value in batch.column(0):
                        row += 1
                        yield self._text_of({self.field: value.as_py()}, f"{path}, row {row}")
        except pyarrow.ArrowException as error:
            raise CorpusError(f"{path}, after row {row}: damaged Parquet data: {error}") from None
        except UnicodeDecodeError as error:
            raise CorpusError(f"{path}, row {row}: not UTF-8: {error.reason}") from None

    def _text_of(self, record: Any, place: str) -> str:
        """Return the text field of a record. Raises CorpusError when there is none that can be stored."""
        if not isinstance(record, dict):
            raise CorpusError(
                f"{place}: expected an object with the field '{self.field}', not {record!r:.40}"
            )
        if self.field not in record:
            raise missing_field(place, self.field, list(record))
        text = record[self.field]
        if not isinstance(text, str):
            raise CorpusError(f"{place}: the field '{self.field}' is {text!r:.40}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise CorpusError(f"{place}: no valid Unicode: {error.reason}") from None
        return text


Reader = Callable[[Path], Iterator[str]]


def _find(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that globs name (** crosses directories), each once, in the order of their paths."""
    if not patterns:
        raise CorpusError("data.paths=[] names no files; set it, such as data.paths=['corpus/*.txt']")
    found: set[str] = set()
    for pattern in patterns:
        matches = [
            path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)
        ]
        if not matches:
            raise CorpusError(f"data.paths: '{pattern}' names no file in {os.getcwd()}")
        found.update(os.path.abspath(path) for path in matches)
    return [Path(path) for path in sorted(found)]


def _reader(corpus: TextFiles, path: Path) -> Reader:
    for ending, read in (
        (".txt", corpus.read_plain),
        (".jsonl", corpus.read_json_lines),
        (".jsonl.gz", corpus.read_json_lines),
        (".parquet", corpus.read_parquet),
    ):
        if path.name.lower().endswith(ending):
            return read
    raise CorpusError(f"{path}: unknown ending; data.paths takes .txt, .jsonl, .jsonl.gz and .parquet")


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        bad = raw[error.start]
        raise CorpusError(
            f"{path}, line {number}: not UTF-8 (byte 0x{bad:02x} at column {error.start + 1}); "
            "convert the file with: iconv -f ENCODING -t UTF-8"
        ) from None


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}, line {number}: not JSON: {error}") from None
