"""data.validation_tokens holds out a corpus's last tokens, and the same ones when the corpus has grown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_cache import files_of, random_documents, stdlib_settings, text_settings, write_documents

from tiny_llm.config.errors import UserError
from tiny_llm.data.cache import CacheError, TokenCache
from tiny_llm.data.prepare import ensure_cache, prepare

EOS = "<|endoftext|>"


def silent(line: str) -> None:
    pass


def tokens_of(cache: TokenCache, documents: list[str]) -> list[int]:
    """Every document's tokens and its EOS, in order."""
    tokenizer, tokens = cache.load_tokenizer(), []
    for document in documents:
        tokens += [*tokenizer.encode(document, add_special_tokens=False).ids, cache.eos_id]
    return tokens


def texts(cache: TokenCache, split: str) -> list[str]:
    tokens = cache.read(split, 0, cache.tokens(split))  # type: ignore[arg-type]
    text = cache.load_tokenizer().decode(tokens.tolist(), skip_special_tokens=False)
    return str(text).split(EOS)


def validation(cache: TokenCache) -> list[int]:
    return cache.read("validation", 0, cache.validation_tokens).tolist()


@pytest.mark.parametrize("count", [2, 17, 500, 1500])
def test_the_last_tokens_of_the_corpus_validate_and_all_before_them_train(tmp_path: Path, count: int) -> None:
    documents = random_documents(60)
    data = text_settings(tmp_path, write_documents(tmp_path / "a.txt", documents), validation_tokens=count)
    cache = ensure_cache(data, 0, silent)
    whole = tokens_of(cache, documents)
    assert validation(cache) == whole[-count:]
    assert "held_out_share" not in cache.manifest["settings"]
    found, held_out = texts(cache, "train")[:-1], cache.manifest["held_out"]["documents"]
    untouched = documents[: -len(held_out)]
    cut = [text for text in found if text not in untouched]
    assert sorted(set(found) - set(cut)) == sorted(untouched)
    assert len(cut) <= 1
    at_the_cut = documents[-len(held_out)]
    assert all(at_the_cut.startswith(text) for text in cut)
    after = texts(cache, "validation")[0]
    kept = len(cut[0]) if cut else 0
    assert at_the_cut[kept:].endswith(after)
    assert len(at_the_cut) - kept - len(after) in (0, 1), "or a space apart"


def test_one_document_is_cut_and_both_ends_keep_their_side(tmp_path: Path) -> None:
    story = " ".join(random_documents(40))
    (tmp_path / "a.txt").write_text(story, encoding="utf-8")
    cache = ensure_cache(text_settings(tmp_path, tmp_path / "a.txt", validation_tokens=300), 0, silent)
    assert validation(cache) == tokens_of(cache, [story])[-300:]
    (head, _), (rest, _) = texts(cache, "train"), texts(cache, "validation")
    assert story.startswith(head)
    assert story.endswith(rest)
    assert len(story) - len(head) - len(rest) in (0, 1)


@pytest.mark.parametrize("tokenizer", ["bpe", "file"])
def test_a_grown_corpus_keeps_the_held_out_file_and_trains_on_none_of_it(
    tmp_path: Path, tokenizer: str
) -> None:
    documents = random_documents(60)
    write_documents(tmp_path / "b.txt", documents)
    changes = {"validation_tokens": 700, "shard_tokens": 500}
    if tokenizer == "file":
        made = ensure_cache(text_settings(tmp_path / "x", tmp_path / "b.txt"), 0, silent)
        changes["tokenizer"] = str(made.directory / "tokenizer")  # type: ignore[assignment]
    data = text_settings(tmp_path, tmp_path / "*.txt", **changes)
    before = prepare(data, 0, silent)
    kept = {name: content for name, content in files_of(before.directory).items() if "validation" in name}
    assert len(kept) == 2
    held_out = documents[-len(before.manifest["held_out"]["documents"]) :]
    trained = texts(before, "train")

    new = random_documents(50, seed=9)
    write_documents(tmp_path / "a.txt", [*new[:25], held_out[1]])  # sorts first, and repeats a document
    write_documents(tmp_path / "c.txt", new[25:])
    after = prepare(data, 0, silent)
    assert {
        name: content for name, content in files_of(after.directory).items() if "validation" in name
    } == kept
    assert after.manifest["held_out"] == before.manifest["held_out"]
    assert after.manifest["tokenizer"] == before.manifest["tokenizer"]
    assert sorted(texts(after, "train")) == sorted([*trained, *new])
    assert prepare(data, 0, silent).identity == after.identity


def test_a_file_that_grows_at_its_end_keeps_its_held_out_middle(tmp_path: Path) -> None:
    story, more = "\n".join(random_documents(40)) + "\n", "\n".join(random_documents(30, seed=3))
    path = tmp_path / "a.txt"
    path.write_text(story, encoding="utf-8")
    data = text_settings(tmp_path, path, validation_tokens=300)
    before = prepare(data, 0, silent)
    held_out, trained = validation(before), texts(before, "train")
    path.write_text(story + more, encoding="utf-8")
    after = prepare(data, 0, silent)
    assert validation(after) == held_out
    assert sorted(texts(after, "train")) == sorted([*trained, more])


def test_a_cache_with_another_tail_or_none_is_refused(tmp_path: Path) -> None:
    paths = write_documents(tmp_path / "a.txt", random_documents(60))
    ensure_cache(text_settings(tmp_path, paths, validation_tokens=300), 0, silent)
    for other in ({"validation_tokens": 301}, {}):
        with pytest.raises(CacheError, match=r"data\.validation_tokens \(cache: 300"):
            ensure_cache(text_settings(tmp_path, paths, **other), 0, silent)


def test_settings_without_a_tail_give_the_manifest_of_ever(tmp_path: Path) -> None:
    paths = write_documents(tmp_path / "a.txt", random_documents(60))
    cache = ensure_cache(text_settings(tmp_path, paths), 0, silent)
    assert "validation_tokens" not in cache.manifest["settings"]
    assert "held_out" not in cache.manifest
    assert cache.manifest["settings"]["held_out_share"] == 0.2


def test_a_tail_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    documents = random_documents(5)
    paths = write_documents(tmp_path / "a.txt", documents)
    size = ensure_cache(text_settings(tmp_path / "x", paths, held_out_share=0.5), 0, silent)
    total = size.train_tokens + size.validation_tokens
    for count in (total, 10 * total):
        with pytest.raises(UserError, match=r"data\.validation_tokens=\d+ leaves nothing"):
            ensure_cache(text_settings(tmp_path, paths, validation_tokens=count), 0, silent)
    assert not (tmp_path / "cache").exists()


def test_a_few_tokens_are_found_behind_long_and_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"\n{EOS}\n".join(["start " * 200, "", "a " * 3000, "", "end"]), encoding="utf-8")
    cache = ensure_cache(text_settings(tmp_path, path, validation_tokens=20), 0, silent)
    assert validation(cache) == tokens_of(cache, ["a " * 3000, "end"])[-20:]


def test_the_standard_library_can_hold_out_its_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "lib"
    root.mkdir()
    for number, text in enumerate(random_documents(30)):
        (root / f"m{number:02d}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr("tiny_llm.data.corpora.sysconfig.get_path", lambda _: str(root))
    cache = ensure_cache(stdlib_settings(tmp_path, validation_tokens=64), 0, silent)
    assert np.array_equal(validation(cache), tokens_of(cache, random_documents(30))[-64:])
