"""Continue a text: one token after another, drawn from the model's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import operations as op
from tiny_llm.models.decoder import head_weight, hidden_states


@torch.no_grad()
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
    """Yield up to `max_new_tokens` token ids that follow the prompt, stopping before `eos_id`.

    temperature 0 takes the likeliest token; top_k keeps that many likeliest ones, None all. The model sees the
    last context_length tokens. Ids that no tokenizer has are the caller's to exclude by its vocabulary.
    """
    weight = head_weight(parameters)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        window_BT = torch.tensor([tokens[-model.context_length :]], device=weight.device)
        last = hidden_states(model, parameters, window_BT, weight.dtype)[:, -1:]
        token = choose(op.linear(last, weight)[0, 0].float().cpu(), temperature, top_k, generator)
        if token == eos_id:
            return
        tokens.append(token)
        yield token


def choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Return one token id drawn from logits [V]."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    probabilities = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
