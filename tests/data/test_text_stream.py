"""Text comes in pieces that are whole characters, and the pieces make the text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from tiny_llm.data import tokenizer as tok
from tiny_llm.data.text_stream import REPLACEMENT, TextStream

TEXTS = [
    "plain words go on",
    "naïve façade",
    "日本語のテキスト",
    "🙂🙃 and 👩‍👩‍👧 and é",
    " a  b   c\n\n\td ",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, with so few entries that most letters outside ASCII take several tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tok.train_bpe(["some words to learn from, and no other letters"], 300, directory)
    return tok.load(directory)


def pieces_of(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_incomplete_characters_are_held_back(tokenizer: Tokenizer, text: str) -> None:
    before = tokenizer.encode("a prompt ").ids
    tokens = tokenizer.encode(text * 5).ids
    pieces = pieces_of(tokenizer, before, tokens)
    assert "".join(pieces) == text * 5
    assert not any(REPLACEMENT in piece for piece in pieces)
    if not text.isascii():
        assert "" in pieces[:-1], "some tokens end within a character"


def test_every_moment_is_valid_and_the_end_is_the_whole_text_for_any_tokens(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("a prompt ").ids
    for seed in range(200):
        draw = random.Random(seed)
        tokens = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randrange(1, 60))]
        pieces = pieces_of(tokenizer, before, tokens)
        for piece in pieces:
            piece.encode("utf-8")
        whole = tokenizer.decode(before + tokens, skip_special_tokens=True)
        assert "a prompt " + "".join(pieces) == whole


def test_what_is_incomplete_at_the_end_shows_as_a_replacement(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab🙂").ids[:-1]
    pieces = pieces_of(tokenizer, [], tokens)
    assert "".join(pieces[:-1]) == "ab"
    assert set(pieces[-1]) == {REPLACEMENT}


def test_spaces_before_words_survive_a_decoder_that_strips_the_first() -> None:
    words = {"▁the": 0, "▁cat": 1, "s": 2, "▁sat": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    pieces = pieces_of(tokenizer, [0], [1, 2, 3, *[1, 3] * 20])
    assert "".join(pieces) == " cats sat" + " cat sat" * 20
    assert tokenizer.decode([1]) == "cat"
