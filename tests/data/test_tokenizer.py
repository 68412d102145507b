"""Tokenizers: the same corpus gives the same bytes, text survives, what cannot serve is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_cache import random_documents, text_settings, write_documents
from tokenizers import Tokenizer, models, pre_tokenizers

from tiny_llm.config.errors import UserError
from tiny_llm.data import tokenizer as tok
from tiny_llm.data.prepare import ensure_cache
from tiny_llm.data.tokenizer import TokenizerError


def word_tokenizer(path: Path, words: list[str], special: list[str]) -> Path:
    """Save a tokenizer.json that knows whole words."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    return path


def test_training_gives_the_same_bytes_every_time(tmp_path: Path) -> None:
    texts = random_documents(300)
    first = tok.train_bpe(texts, 500, tmp_path / "a")
    second = tok.train_bpe(iter(texts), 500, tmp_path / "b")
    assert first == second
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    assert first.entries == 500
    assert first.eos_token == "<|endoftext|>"


def test_any_text_survives_encoding_and_any_ids_decode_to_text(tmp_path: Path) -> None:
    tok.train_bpe(random_documents(50), 300, tmp_path)
    tokenizer = tok.load(tmp_path)
    text = "tabs\tand 日本 🎉 \r\n  spaces <|endoftext|> \x00"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    tokenizer.decode(list(range(300))).encode("utf-8")


def test_a_small_corpus_fills_fewer_entries(tmp_path: Path) -> None:
    facts = tok.train_bpe(["ab ab"], 5000, tmp_path)
    assert 257 <= facts.entries < 270


def test_training_stops_reading_at_the_end_of_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tok, "SAMPLE_BYTES", 1000)
    taken = []

    def endless() -> object:
        while True:
            taken.append(100)
            yield "x" * 100

    tok.train_bpe(endless(), 300, tmp_path)  # type: ignore[arg-type]
    assert len(taken) <= 11


def test_a_special_token_spelled_in_a_document_is_text(tmp_path: Path) -> None:
    facts = tok.train_bpe(random_documents(50), 300, tmp_path)
    ids = tok.load(tmp_path).encode("before <|endoftext|> after", add_special_tokens=False).ids
    assert facts.eos_id not in ids


def test_limits_saved_in_a_tokenizer_json_do_not_cut_documents(tmp_path: Path) -> None:
    tok.train_bpe(random_documents(50), 300, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = tokenizer.encode("the cat sat on the mat", add_special_tokens=False).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tok.load(tmp_path).encode("the cat sat on the mat", add_special_tokens=False).ids == plain


@pytest.mark.parametrize(
    "form", ['{"eos_token": "<stop>"}', '{"eos_token": {"content": "<stop>", "lstrip": false}}']
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_eos_is_the_one_that_the_files_beside_it_name(tmp_path: Path, form: str, name: str) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", ["a"], ["</s>", "<stop>"])
    (tmp_path / name).write_text(form)
    facts = tok.import_tokenizer(path, "mine", None, tmp_path / "out")
    assert facts.eos_token == "<stop>"
    assert facts.eos_id == 3
    assert facts.fingerprint == tok.import_tokenizer(path, "mine", None, tmp_path / "again").fingerprint
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["eos_token"] == "<stop>"


def test_a_well_known_eos_is_found_without_such_files(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", ["a"], ["</s>"])
    assert tok.import_tokenizer(path, "mine", None, tmp_path / "out").eos_token == "</s>"


def test_a_tokenizer_without_eos_is_refused_by_name(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", ["a"], [])
    with pytest.raises(TokenizerError, match=r"data\.tokenizer=mine: no end-of-document token.*eos_token"):
        tok.import_tokenizer(path, "mine", None, tmp_path / "out")


def test_a_named_eos_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", ["a"], ["</s>"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(TokenizerError, match="'<gone>'"):
        tok.import_tokenizer(path, "mine", None, tmp_path / "out")


@pytest.mark.parametrize("content", [None, "{}", "[1", '{"model": 3}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        tok.import_tokenizer(path, "mine", None, tmp_path / "out")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_the_number_to_set(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus.txt", random_documents(40))
    words = [f"w{i}" for i in range(600)]
    path = word_tokenizer(tmp_path / "tokenizer.json", words, ["</s>"])
    data = text_settings(tmp_path, corpus, tokenizer=str(path))
    with pytest.raises(UserError, match=r"set data\.vocab_size=602"):
        ensure_cache(data, 0, lambda line: None)
    assert not Path(data.cache_dir).exists()
    cache = ensure_cache(
        text_settings(tmp_path, corpus, tokenizer=str(path), vocab_size=602), 0, lambda line: None
    )
    assert cache.eos_id == 601
    assert cache.load_tokenizer().token_to_id("w599") == 600


def test_a_vocabulary_over_16_bits_is_refused(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", [f"w{i}" for i in range(65535)], ["</s>"])
    facts = tok.import_tokenizer(path, "huge", None, tmp_path / "out")
    with pytest.raises(TokenizerError, match=r"65,537 entries.*65,536"):
        tok.check_vocabulary(facts, 65536)


def test_a_random_encoding_is_made_certain(tmp_path: Path) -> None:
    tok.train_bpe(random_documents(50), 400, tmp_path)
    page = json.loads((tmp_path / "tokenizer.json").read_text())
    page["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(page))
    tokenizer = tok.load(tmp_path)
    assert len({tuple(tokenizer.encode("the cat sat on the mat").ids) for _ in range(20)}) == 1
