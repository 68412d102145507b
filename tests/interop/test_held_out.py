"""Held-out text is that of the corpus, and the loss on it that of the definition."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, normalizers

sys.path.append(str(Path(__file__).parent))
from trained_runs import RunOf

from tiny_llm.config.compose import compose
from tiny_llm.data.corpora import is_held_out
from tiny_llm.interop.exporting import Request, export
from tiny_llm.interop.held_out import HeldOut, evaluate_text, read_held_out
from tiny_llm.interop.opened import OpenModel, open_model


@pytest.fixture
def opened(run_of: RunOf, tmp_path: Path) -> OpenModel:
    export(Request(str(run_of("llama", 1)), None, None, "hf", "fp32", False, "cpu"), tmp_path / "out")
    return open_model(tmp_path / "out", "cpu")


def test_a_model_that_knows_nothing_costs_the_bits_of_its_vocabulary(opened: OpenModel) -> None:
    ignorant = {name: torch.zeros_like(value) for name, value in opened.weights.items()}
    held_out = HeldOut("here", ("a sentence of ünïcödé", "another"))
    found = evaluate_text(replace(opened, weights=ignorant), held_out, 7)
    assert found.bytes == len("a sentence of unicode") + 4 + len("another")
    assert found.loss == pytest.approx(math.log(512), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(9 * found.targets / found.bytes, rel=1e-6)
    assert found.altered == 0


def test_a_tokenizer_that_drops_text_is_named(opened: OpenModel) -> None:
    lossy = Tokenizer.from_str(opened.tokenizer.to_str())
    lossy.normalizer = normalizers.Lowercase()
    held_out = HeldOut("here", ("LOUD text", "quiet text"))
    assert evaluate_text(replace(opened, tokenizer=lossy), held_out, 8).altered == 1


def test_held_out_documents_of_a_cache_are_those_of_the_corpus(tiny_overrides: list[str]) -> None:
    config = compose(tiny_overrides).config().data
    cache = config.cache_dir
    (pattern,) = config.paths  # type: ignore[union-attr]
    texts = [path.read_text() for path in sorted(Path(pattern).parent.glob("*.txt"))]
    expected = [text for text in texts if text and is_held_out(text, 0.2)]
    assert list(read_held_out(cache, None).documents) == expected
    some = read_held_out(cache, len(expected[0].encode()) + 1)
    assert list(some.documents) == expected[:1]
    assert list(read_held_out(pattern, None).documents) == [text for text in texts if text]
