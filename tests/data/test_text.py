"""data=text reads each format, in a fixed order, and names the place of whatever it cannot read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from small_cache import text_settings

from tiny_llm.data import text as text_module
from tiny_llm.data.corpora import CorpusError
from tiny_llm.data.text import TextFiles


def documents(path: Path, **changes: Any) -> list[str]:
    return [text for _, text in TextFiles(text_settings(path.parent, path, **changes)).documents()]


def json_lines(*texts: str) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first line\n\nsecond line\n")
    assert documents(path) == ["first line\n\nsecond line\n"]


def test_separator_lines_part_a_txt_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\nline\n<|endoftext|>\ntwo <|endoftext|> here\r\n<|endoftext|>\nthree\n")
    assert documents(path) == ["one\nline", "two <|endoftext|> here", "three"]
    assert documents(path, separator="two <|endoftext|> here") == [
        "one\nline\n<|endoftext|>",
        "<|endoftext|>\nthree",
    ]


def test_blank_lines_part_a_txt_file_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\nline\n\n\ntwo\n\nthree")
    assert [text for text in documents(path, separator="") if text] == ["one\nline", "two", "three"]


def test_a_byte_order_mark_and_windows_line_ends_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert documents(path) == ["one\ntwo\n"]


def test_json_lines_plain_and_compressed(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(json_lines("one", "zwei ☃") + b"\n")
    compressed.write_bytes(gzip.compress(json_lines("one", "zwei ☃")))
    assert documents(plain) == documents(compressed) == ["one", "zwei ☃"]
    assert documents(plain, text_field="text") == ["one", "zwei ☃"]


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "body": ["one", "zwei ☃"]}), path)
    assert documents(path, text_field="body") == ["one", "zwei ☃"]


def test_files_come_once_and_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = [f"{folder}/{number}.txt" for folder in "ba" for number in (7, 30, 1, 12)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    data = text_settings(tmp_path, tmp_path / "**/*.txt", tmp_path / "b/*.txt")
    assert [text for _, text in TextFiles(data).documents()] == sorted(names)


def gzipped(content: bytes) -> bytes:
    """Return the same bytes at any time of day: they are part of the tests' names."""
    return gzip.compress(content, mtime=0)


BAD = [
    ("a.txt", b"fine\nbad \xff here\n", r"a\.txt, line 2: not UTF-8 \(byte 0xff at column 5\)"),
    ("a.jsonl", json_lines("x") + b'{"text": "\xe9"}\n', r"a\.jsonl, line 2: not UTF-8"),
    ("a.jsonl", json_lines("x", "y") + b'{"text": \n', r"a\.jsonl, line 3: not JSON"),
    ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl, line 1: not JSON"),
    (
        "a.jsonl",
        b'{"body": "x", "texts": 1}\n',
        r"a\.jsonl, line 1: no field 'text'.*body, texts.*mean 'texts'",
    ),
    ("a.jsonl", b'\n["text"]\n', r"a\.jsonl, line 2: expected an object"),
    ("a.jsonl", b'{"text": null}\n', r"a\.jsonl, line 1: the field 'text' is None"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: no valid Unicode"),
    ("a.jsonl.gz", gzipped(json_lines("x") + b"{\n"), r"a\.jsonl\.gz, line 2: not JSON"),
    ("a.jsonl.gz", gzipped(json_lines("x") + b'"\xff"\n'), r"a\.jsonl\.gz, line 2: not UTF-8"),
    ("a.jsonl.gz", gzipped(json_lines(*"abc"))[:-9], r"a\.jsonl\.gz, after line \d: damaged gzip"),
    ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz, after line 0: damaged gzip"),
    ("a.parquet", b"no parquet at all", r"a\.parquet.*Parquet"),
    ("a.csv", b"a,b\n", r"a\.csv: unknown ending.*\.parquet"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_the_place_of_a_fault_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        documents(path)


def test_faults_in_parquet_name_the_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["x", None], "body": ["y", "z"]}), path)
    with pytest.raises(CorpusError, match=r"a\.parquet, row 2: the field 'text' is None"):
        documents(path)
    with pytest.raises(
        CorpusError, match=r"a\.parquet: no field 'words'; set data\.text_field to one of text, body"
    ):
        documents(path, text_field="words")
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"x\xff")],
    )
    parquet.write_table(pyarrow.table({"text": bad}), path)
    with pytest.raises(CorpusError, match=r"a\.parquet, row 2: not UTF-8"):
        documents(path)


def test_globs_that_name_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"data\.paths=\[\]"):
        TextFiles(text_settings(tmp_path))
    with pytest.raises(CorpusError, match=r"none\*\.txt' names no file"):
        TextFiles(text_settings(tmp_path, tmp_path / "none*.txt"))


def test_an_endless_document_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "LARGEST_DOCUMENT", 1000)
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 100)
    with pytest.raises(CorpusError, match=r"a\.txt, line 67: .*data\.separator"):
        documents(path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    corpus = TextFiles(text_settings(tmp_path, path))
    path.unlink()
    with pytest.raises(CorpusError, match=r"a\.txt: cannot read it: No such file"):
        list(corpus.documents())
