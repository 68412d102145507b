"""Continue token sequences: one token after another, each drawn from the model's distribution.

R sequences  V vocabulary

A sequence is read once into a `KeyValueCache`; from then on a token costs one position. The model sees at most
context_length tokens. When a sequence of n tokens no longer fits, the view moves on by half a context at once
(`window_start`), and what is left of it is read again: the same tokens as from reading the view anew for every
token, which is what tests/ do, at the price of one reading every half context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import operations as op
from tiny_llm.models.cache import KeyValueCache
from tiny_llm.models.decoder import head_weight, hidden_states, layer_parameters


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; in this order temperature, top_k, top_p.

    temperature 0 takes the likeliest token. top_k keeps that many likeliest tokens, top_p the fewest likeliest
    ones that together have at least this probability (Holtzman et al. 2020); None keeps all.
    """

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None


def generate(
    model: ModelConfig,
    parameters: Mapping[str, Tensor],
    prompt: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    eos_id: int | None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids that follow one prompt, stopping before `eos_id`."""
    sampling = Sampling(temperature, top_k)
    for _, token in generate_all(model, parameters, [prompt], max_new_tokens, sampling, [seed], eos_id):
        yield token


@torch.inference_mode()
def generate_all(
    model: ModelConfig,
    parameters: Mapping[str, Tensor],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    eos_id: int | None,
) -> Iterator[tuple[int, int]]:
    """Yield (sequence, token id) as tokens come: up to `max_new_tokens` for each prompt, none from its EOS on.

    Prompts hold at least one token each and may differ in length. A sequence draws from a generator of its own
    `seeds`, so company changes nothing but rounding. Ids that no tokenizer has are the caller's to exclude by
    its vocabulary.
    """
    sequences = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    reader = Reader(model, parameters, len(sequences))
    going = list(range(len(sequences)))
    for _ in range(max_new_tokens):
        logits_RV = reader.next_logits([sequences[row] for row in going])
        kept = []
        for place, row in enumerate(going):
            token = choose(logits_RV[place], sampling, generators[row])
            if token != eos_id:
                sequences[row].append(token)
                kept.append(place)
                yield row, token
        if len(kept) < len(going):
            going = [going[place] for place in kept]
            reader.keep(kept)
        if not going:
            return


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return one token id drawn from logits [V]."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if sampling.top_k is None or sampling.top_k >= len(logits_V):
        return _drawn(logits_V, sampling, generator)
    logits_K, tokens_K = logits_V.topk(sampling.top_k)  # a draw from a whole vocabulary costs a layer's time
    return int(tokens_K[_drawn(logits_K, sampling, generator)])


def _drawn(logits_K: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a place of logits [K], as often as temperature and top_p say."""
    probabilities_K = torch.softmax(logits_K / sampling.temperature, dim=-1)
    if sampling.top_p is not None:
        probabilities_K = _nucleus(probabilities_K, sampling.top_p)
    return int(torch.multinomial(probabilities_K, 1, generator=generator))


def _nucleus(probabilities_K: Tensor, top_p: float) -> Tensor:
    """Set to 0 every token that likelier ones with at least `top_p` together come before."""
    ordered_K, order_K = probabilities_K.sort(descending=True, stable=True)
    before_K = ordered_K.cumsum(-1) - ordered_K
    return probabilities_K.index_fill(0, order_K[before_K >= top_p], 0.0)


def window_start(length: int, context_length: int) -> int:
    """Return the first token that the model sees of a sequence: 0 while it fits, then steps of half a context."""
    step = max(1, context_length // 2)
    return -(-max(0, length - context_length) // step) * step


class Reader:
    """Reads sequences that grow by one token from call to call, and remembers what it has read."""

    def __init__(self, model: ModelConfig, parameters: Mapping[str, Tensor], rows: int) -> None:
        self.model, self.parameters = model, parameters
        self.head = head_weight(parameters)
        self.layers = [layer_parameters(parameters, layer) for layer in range(model.layers)]
        self.cache = KeyValueCache(model, rows, self.head.dtype, self.head.device)
        self.starts = [-1] * rows  # the first token each sequence's cache begins with; -1: nothing read

    def next_logits(self, sequences: Sequence[list[int]]) -> Tensor:
        """Return logits [R, V] of the token after each sequence, in fp32 on the CPU."""
        starts = [window_start(len(tokens), self.model.context_length) for tokens in sequences]
        anew = [row for row, start in enumerate(starts) if start != self.starts[row]]
        on = [row for row, start in enumerate(starts) if start == self.starts[row]]
        self.starts = starts
        pieces = [sequences[row][starts[row] if row in anew else -1 :] for row in range(len(sequences))]
        last_RD = self.head.new_empty(len(sequences), self.head.shape[1])
        for rows in filter(None, (anew, on)):
            places = [len(sequences[row]) - len(pieces[row]) - starts[row] for row in rows]
            last_RD[rows] = self._read(rows, [pieces[row] for row in rows], places)
        return op.linear(last_RD, self.head).float().cpu()

    def _read(self, rows: list[int], pieces: list[list[int]], places: list[int]) -> Tensor:
        """Read `pieces` at `places` of the sequences `rows`; return the state after each, [R, D]."""
        longest = max(map(len, pieces))
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        tokens_RT = torch.tensor(padded, device=self.head.device)
        cached = self.cache.at(rows, places, longest)
        x_RTD = hidden_states(
            self.model, self.parameters, tokens_RT, self.head.dtype, cached=cached, layers=self.layers
        )
        if longest == 1:
            return x_RTD[:, 0]
        return x_RTD[torch.arange(len(rows)), [len(piece) - 1 for piece in pieces]]

    def keep(self, rows: list[int]) -> None:
        """Forget every sequence but `rows`, which move up."""
        self.cache.keep(rows)
        self.starts = [self.starts[row] for row in rows]
