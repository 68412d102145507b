"""Documents: which split they belong to, for ever, and the order in which they come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_cache import random_documents

from tiny_llm.data.corpora import (
    CorpusError,
    StandardLibrary,
    divide,
    is_held_out,
    shuffle,
    smallest_share,
    training_sample,
)


def splits_of(documents: list[str], share: float) -> dict[str, str]:
    return {text: split for split, text in divide(((None, text) for text in documents), share)}


def test_a_document_keeps_its_split_however_the_corpus_grows() -> None:
    documents = random_documents(500)
    small = splits_of(documents[:100], 0.1)
    large = splits_of(documents[::-1] + random_documents(300, seed=9), 0.1)
    assert set(small.values()) == {"train", "validation"}
    assert all(large[text] == split for text, split in small.items())


def test_a_larger_share_keeps_what_a_smaller_one_held_out() -> None:
    documents = random_documents(500)
    assert all(is_held_out(text, 0.3) for text in documents if is_held_out(text, 0.1))


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_share_is_about_what_was_asked_for(share: float) -> None:
    held_out = sum(is_held_out(f"document {i}", share) for i in range(4000))
    assert abs(held_out / 4000 - share) < 0.03


def test_copies_of_a_document_are_on_one_side() -> None:
    documents = random_documents(100) * 3
    sides: dict[str, set[str]] = {}
    for split, text in divide(((None, text) for text in documents), 0.3):
        sides.setdefault(text, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())


def test_training_copies_of_official_validation_documents_are_dropped_and_seen() -> None:
    texts = ["validation a", "validation b", "train c", "train a", "train a", "train d"]
    source = [tuple(text.split()) for text in texts]
    found = list(divide(iter(source), 0.5))  # type: ignore[arg-type]
    assert found == [*source[:3], ("duplicate", ""), ("duplicate", ""), source[5]]


def test_empty_documents_are_left_out() -> None:
    assert list(divide([(None, ""), ("train", ""), ("train", "x")], 0.5)) == [("train", "x")]


def test_shuffling_moves_training_documents_only_and_loses_none() -> None:
    documents = [("validation" if i % 5 == 0 else "train", str(i)) for i in range(500)]
    shuffled = list(shuffle(iter(documents), 50, seed=3))  # type: ignore[arg-type]
    assert [d for d in shuffled if d[0] == "validation"] == [d for d in documents if d[0] == "validation"]
    assert sorted(shuffled) == sorted(documents)
    train = [int(text) for split, text in shuffled if split == "train"]
    assert train != sorted(train)
    assert shuffled == list(shuffle(iter(documents), 50, seed=3))  # type: ignore[arg-type]
    assert shuffled != list(shuffle(iter(documents), 50, seed=4))  # type: ignore[arg-type]


def test_shuffling_holds_no_more_than_its_buffer() -> None:
    taken = 0

    def source() -> object:
        nonlocal taken
        for i in range(1000):
            taken += 1
            yield "train", str(i)

    stream = shuffle(source(), 20, seed=0)  # type: ignore[arg-type]
    for given in range(1, 100):
        next(stream)
        assert taken - given <= 20


def test_the_standard_library_comes_without_tests_and_packages() -> None:
    library = StandardLibrary(Path(subprocess.__file__).parent)
    names = [path.relative_to(library.root).as_posix() for path in library.files]
    assert names == sorted(names) or len(names) == len(set(names))
    assert "subprocess.py" in names
    assert not any("site-packages" in name or "/test" in name or name.startswith("test/") for name in names)
    assert 8e6 < library.estimated_bytes() < 20e6
    assert library.sources() == StandardLibrary(library.root).sources()


def test_files_in_an_encoding_that_they_do_not_name_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "c.py").write_bytes(b"# -*- coding: no-such-encoding -*-\n")
    (tmp_path / "d.py").write_text("y = 1\n")
    texts = [text for _, text in StandardLibrary(tmp_path).documents()]
    assert len(texts) == 2
    assert "é" in texts[0]


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="data=text"):
        StandardLibrary(tmp_path)


def test_the_sample_for_a_tokenizer_is_bounded_and_spread_over_the_corpus(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03d}.py").write_text(f"x = {i:04d}\n" * 20)
    library = StandardLibrary(tmp_path)
    sample = list(training_sample(library, 0.1, library.estimated_bytes() // 4))
    places = [int(text[4:8]) for text in sample]
    assert 20 < len(sample) < 80
    assert min(places) < 40
    assert max(places) > 160
    assert not any(is_held_out(text, 0.1) for text in sample)


def test_the_smallest_share_leaves_documents_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    assert smallest_share(StandardLibrary(tmp_path)) is None
    (tmp_path / "b.py").write_text("b = 1\n")
    library = StandardLibrary(tmp_path)
    share = smallest_share(library)
    assert share is not None
    assert {split for split, _ in divide(library.documents(), share)} == {"train", "validation"}


def test_preparing_never_imports_torch() -> None:
    program = (
        "import sys, tiny_llm.data.prepare, tiny_llm.data.encoding; "
        "print({'torch', 'datasets'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
