"""Text in, text out, with a trained model and its corpus's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from tokenizers import Tokenizer
from torch import Tensor

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import Config
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.text_stream import TextStream
from tiny_llm.models.generation import Sampling, generate_all
from tiny_llm.training.progress import PatientStream


class TextSource(Protocol):
    """Whose tokenizer reads and writes texts: a token cache's, or that beside imported weights."""

    @property
    def eos_id(self) -> int: ...

    def load_tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class TextSampler:
    """A model that continues texts. Sample s of a prompt is drawn with seed + s, whatever else is sampled."""

    config: Config
    weights: Mapping[str, Tensor]
    cache: TextSource
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0

    def stream(self, prompts: Sequence[str], num_samples: int = 1) -> Iterator[tuple[int, str]]:
        """Yield (text, piece): pieces of all texts as they come; text p * num_samples + s continues prompt p.

        The prompts come first. Each piece is valid UTF-8. Raises UserError for a prompt outside the vocabulary.
        """
        tokenizer = self.cache.load_tokenizer()
        encoded = [self._encode(tokenizer, prompt) for prompt in prompts]
        samples = range(num_samples)
        streams = [TextStream(tokenizer, tokens) for tokens in encoded for _ in samples]
        yield from enumerate(_valid(prompt) for prompt in prompts for _ in samples)
        tokens_of_all = generate_all(
            self.config.model,
            self.weights,
            [tokens for tokens in encoded for _ in samples],
            self.max_new_tokens,
            self.sampling,
            [self.seed + s for _ in prompts for s in samples],
            self.cache.eos_id,
        )
        for text, token in tokens_of_all:
            if piece := streams[text].push(token):
                yield text, piece
        yield from ((text, piece) for text, stream in enumerate(streams) if (piece := stream.finish()))

    def _encode(self, tokenizer: Any, prompt: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(_valid(prompt), add_special_tokens=False).ids
        if any(token >= self.config.model.vocab_size for token in tokens):
            raise UserError(
                f"prompt={prompt!r} has tokens outside the model's vocabulary of {self.config.model.vocab_size}"
            )
        return tokens or [self.cache.eos_id]

    def texts(self, prompts: Sequence[str], num_samples: int = 1) -> list[str]:
        """Return each prompt with its continuation, num_samples for each."""
        texts = [""] * (len(prompts) * num_samples)
        for text, piece in self.stream(prompts, num_samples):
            texts[text] += piece
        return texts


def _valid(text: str) -> str:
    """Return a text without the half surrogates that a command line may hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


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
    """Return the prompt and one continuation; always valid UTF-8. Raises UserError."""
    sampler = TextSampler(config, weights, cache, max_new_tokens, Sampling(temperature, top_k), seed)
    return sampler.texts([prompt])[0]


def sample_rows(
    config: Config, weights: Mapping[str, Tensor], cache: TokenCache, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return one row for samples.jsonl for each of evaluation.prompts, beginning with `facts`."""
    prompts = config.evaluation.prompts
    if not prompts:
        return []
    sampler = TextSampler(config, weights, cache, seed=config.evaluation.seed)
    settings = {**vars(sampler.sampling), "max_new_tokens": sampler.max_new_tokens, "seed": sampler.seed}
    return [
        {**facts, "prompt": prompt, "text": text, **settings}
        for prompt, text in zip(prompts, sampler.texts(prompts), strict=True)
    ]


def show_sample(
    config: Config, weights: Mapping[str, Tensor], cache: TokenCache, prompt: str, log: TextIO
) -> None:
    """Print a sample of the trained model and keep it in run.log."""
    text = continue_text(config, weights, cache, prompt, max_new_tokens=96)
    message = f"\nA sample of what the model learned, continuing {prompt!r}:\n\n{text}\n"
    PatientStream(log).write(message)
    print(message)
