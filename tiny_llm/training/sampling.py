"""Text in, text out, with a trained model and its corpus's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from torch import Tensor

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import Config
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.tokenizer import load_tokenizer
from tiny_llm.models.generation import generate


def continue_text(
    config: Config,
    weights: Mapping[str, Tensor],
    cache: TokenCache,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation; always valid UTF-8. Raises UserError for an empty prompt."""
    tokenizer = load_tokenizer(cache.directory)
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids or [cache.eos_id]
    if any(token >= config.model.vocab_size for token in tokens):
        raise UserError(
            f"prompt={prompt!r} has tokens outside the model's vocabulary of {config.model.vocab_size}"
        )
    new = generate(config.model, weights, tokens, max_new_tokens, temperature, top_k, seed, cache.eos_id)
    return (
        prompt
        + str(tokenizer.decode([*tokens, *new], skip_special_tokens=True))[len(tokenizer.decode(tokens)) :]
    )


def show_sample(
    config: Config, weights: Mapping[str, Tensor], cache: TokenCache, prompt: str, log: TextIO
) -> None:
    """Print a sample of the trained model and keep it in run.log."""
    text = continue_text(config, weights, cache, prompt, max_new_tokens=96)
    message = f"\nA sample of what the model learned, continuing {prompt!r}:\n\n{text}\n"
    log.write(message)
    print(message)
