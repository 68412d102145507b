"""A model of an export or of a Hugging Face directory, ready to be used: weights on a device, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_llm.config.schema import ModelConfig
from tiny_llm.data.tokenizer import find_eos, load
from tiny_llm.interop.pretrained import open_pretrained
from tiny_llm.interop.tensors import ExchangeError
from tiny_llm.models.generation import generate
from tiny_llm.training.device import open_device

NEW_TOKENS = 32


@dataclass(frozen=True)
class OpenModel:
    """A model with its tokenizer; texts end with the token `eos_id`."""

    model: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    eos_id: int
    device: torch.device

    def load_tokenizer(self) -> Tokenizer:
        return self.tokenizer


def open_model(directory: Path, device: str) -> OpenModel:
    """Open a directory of weights and tokenizer. Raises ExchangeError and other UserErrors."""
    pretrained, place = open_pretrained(directory), open_device(device)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ExchangeError(f"{directory} holds no tokenizer.json; copy that of the model there")
    tokenizer = load(directory)
    eos_id = tokenizer.token_to_id(find_eos(tokenizer, path, str(path)))
    if eos_id is None or eos_id >= pretrained.model.vocab_size:
        raise ExchangeError(
            f"{path} has no EOS within the model's vocabulary of {pretrained.model.vocab_size}"
        )
    weights = {name: value.to(place) for name, value in pretrained.weights.items()}
    return OpenModel(pretrained.model, weights, tokenizer, eos_id, place)


def greedy_continuation(opened: OpenModel, prompt: str, new_tokens: int = NEW_TOKENS) -> str:
    """Return what a model continues a prompt with when it always takes the likeliest token."""
    ids = opened.tokenizer.encode(prompt, add_special_tokens=False).ids or [opened.eos_id]
    new = generate(opened.model, opened.weights, ids, new_tokens, 0.0, None, 0, opened.eos_id)
    whole = opened.tokenizer.decode([*ids, *new], skip_special_tokens=True)
    return str(whole[len(opened.tokenizer.decode(ids, skip_special_tokens=True)) :])
