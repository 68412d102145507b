"""Sampling with a key-value cache gives the tokens that reading the whole view anew gives."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import generation
from tiny_llm.models.decoder import loss_sums
from tiny_llm.models.generation import Sampling, choose, generate, generate_all, window_start

sys.path.append(str(Path(__file__).parents[1]))
from reference.families import ReferenceFamily
from reference.small import one_thread, random_state  # noqa: F401

LLAMA = ModelConfig(
    vocab_size=61, layers=2, width=16, heads=4, ffn_width=20, context_length=16,
    rope_theta=50.0, norm_eps=1e-3, init_std=0.02,
)  # fmt: skip
GPT2 = replace(
    LLAMA, norm="layernorm", mlp="gelu", positions="learned", output_bias=True, mlp_bias=True, tied=False
)
MODELS = {
    "llama": LLAMA,
    "gpt2": replace(GPT2, qkv_bias=True, dropout=0.5),
    "qwen3": replace(LLAMA, qk_norm=True, tied=False, head_dim=6),
    "groups": replace(LLAMA, kv_heads=2, qk_norm=True),
    "odd context": replace(GPT2, context_length=7),
    "context of one": replace(GPT2, context_length=1),
}
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[5, 7, 11], [3], list(range(16)), list(range(40, 60)), [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def view(tokens: list[int], length: int) -> list[int]:
    """What the model sees of a sequence: all of it, or what is left when half contexts have been let go."""
    while len(tokens) > length:
        tokens = tokens[max(1, length // 2) :]
    return tokens


def last_logits(model: ModelConfig, state: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The slow twin's logits after a sequence, read from its beginning."""
    return ReferenceFamily(model, state).logits(torch.tensor([view(tokens, model.context_length)]))[0, -1]


def recomputed(
    model: ModelConfig, state: dict[str, Tensor], prompt: list[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """Tokens chosen with seed 0, every one from reading the whole view."""
    tokens, generator = list(prompt), torch.Generator().manual_seed(0)
    for _ in range(count):
        tokens.append(choose(last_logits(model, state, tokens).float(), sampling, generator))
    return tokens[len(prompt) :]


def cached(
    model: ModelConfig, state: dict[str, Tensor], prompt: list[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    return [token for _, token in generate_all(model, state, [prompt], count, sampling, [0], None)]


def greedy(model: ModelConfig, state: dict[str, Tensor], prompt: list[int], count: int) -> list[int]:
    return list(generate(model, state, prompt, count, 0.0, None, 0, None))


@by_model
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
def test_tokens_are_those_of_recomputing_also_past_the_context(model: ModelConfig, prompt: list[int]) -> None:
    state = random_state(model, 1)
    assert greedy(model, state, prompt, 30) == recomputed(model, state, prompt, 30)
    varied = Sampling(temperature=3.0, top_k=30, top_p=0.95)  # where greedy models repeat themselves
    tokens = cached(model, state, prompt, 30, varied)
    assert tokens == recomputed(model, state, prompt, 30, varied)
    assert len(set(tokens)) > 10


def test_logits_from_the_cache_are_those_of_recomputing() -> None:
    for model in MODELS.values():
        state, tokens = random_state(model, 2), [4, 2]
        reader = generation.Reader(model, state, 1)
        for token in range(30):
            logits = reader.next_logits([tokens])[0].double()
            expected = last_logits(model, state, tokens)
            assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
            tokens = [*tokens, token % model.vocab_size]


@by_model
def test_prompts_of_any_lengths_go_together_as_they_go_alone(model: ModelConfig) -> None:
    state = random_state(model, 1)
    together: list[list[int]] = [[] for _ in PROMPTS]
    for row, token in generate_all(model, state, PROMPTS, 25, GREEDY, [0] * len(PROMPTS), None):
        together[row].append(token)
    assert together == [greedy(model, state, prompt, 25) for prompt in PROMPTS]


@by_model
def test_a_sequence_that_ends_leaves_the_others_as_they_were(model: ModelConfig) -> None:
    state = random_state(model, 1)
    alone = [greedy(model, state, prompt, 40) for prompt in PROMPTS]
    eos = alone[0][5]
    together: list[list[int]] = [[] for _ in PROMPTS]
    for row, token in generate_all(model, state, PROMPTS, 40, GREEDY, [0] * len(PROMPTS), eos):
        together[row].append(token)
    assert together == [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in alone]
    assert len({len(tokens) for tokens in together}) > 1


@by_model
def test_a_sequence_that_moves_up_keeps_its_own_place(model: ModelConfig) -> None:
    """... also when its view moves on to where that of the sequence before it had been."""
    state, length = random_state(model, 1), model.context_length
    step = max(1, length // 2)
    longer, shorter = ([token % 50 for token in range(length + extra)] for extra in (2 * step, step))
    reader = generation.Reader(model, state, 2)
    reader.next_logits([longer, shorter])
    reader.keep([1])
    for token in (7, 8, 9):
        shorter = [*shorter, token]
        expected = last_logits(model, state, shorter)
        assert (reader.next_logits([shorter])[0] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_when_all_have_ended_nothing_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state(LLAMA, 1)
    first = greedy(LLAMA, state, [5], 1)[0]
    reads: list[int] = []
    read = generation.Reader._read
    monkeypatch.setattr(generation.Reader, "_read", lambda *all_: reads.append(1) or read(*all_))  # type: ignore[func-returns-value]
    assert list(generate(LLAMA, state, [5], 100, 0.0, None, 0, first)) == []
    assert len(reads) == 1


def test_a_token_within_the_context_costs_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    state, widths = random_state(LLAMA, 1), []
    forward = generation.hidden_states

    def counted(
        model: ModelConfig, parameters: object, tokens: Tensor, *rest: object, **named: object
    ) -> Tensor:
        widths.append(tokens.shape[1])
        return forward(model, parameters, tokens, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(generation, "hidden_states", counted)
    greedy(LLAMA, state, [1, 2, 3], 40)
    assert [width for width in widths if width > 1] == [3, 9, 9, 9, 9]


def test_the_view_moves_by_half_a_context_and_always_fits() -> None:
    for length in (1, 2, 7, 16):
        starts = [window_start(count, length) for count in range(1, 100)]
        for count, start in enumerate(starts, 1):
            assert list(range(count))[start:] == view(list(range(count)), length)
            assert 1 <= count - start <= length
            assert start == 0 or count - start > length - max(1, length // 2)


def test_a_seed_gives_its_tokens_alone_and_in_company() -> None:
    state, sampling = random_state(LLAMA, 1), Sampling(1.0, None)
    together: list[list[int]] = [[] for _ in range(4)]
    prompts = [[5], [6, 7], [5], [5]]
    for row, token in generate_all(LLAMA, state, prompts, 20, sampling, [3, 3, 4, 3], None):
        together[row].append(token)
    alone = list(generate(LLAMA, state, [5], 20, 1.0, None, 3, None))
    assert together[0] == together[3] == alone
    assert together[2] != alone
    assert together[1] != alone


def slow_distribution(logits: Tensor, sampling: Sampling) -> dict[int, float]:
    """The probability of each token that can be chosen, token by token."""
    scores = [value / sampling.temperature for value in logits.tolist()]
    ranked = sorted(range(len(scores)), key=lambda token: -scores[token])[: sampling.top_k]
    weights = {token: 2.718281828459045 ** (scores[token] - scores[ranked[0]]) for token in ranked}
    kept: dict[int, float] = {}
    for token in ranked:
        if sum(kept.values()) >= (sampling.top_p or 2) * sum(weights.values()):
            break
        kept[token] = weights[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.6, 0.9, 1.0])
def test_tokens_come_as_often_as_the_distribution_says(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    sampling, generator = Sampling(temperature, top_k, top_p), torch.Generator().manual_seed(0)
    expected, draws = slow_distribution(logits, sampling), 1500
    counts = [0] * 12
    for _ in range(draws):
        counts[choose(logits, sampling, generator)] += 1
    for token, count in enumerate(counts):
        share = expected.get(token, 0.0)
        assert count == 0 if share == 0 else abs(count / draws - share) < 5 * (share / draws) ** 0.5


def test_temperature_zero_takes_the_likeliest_token_whatever_else_is_asked() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    assert choose(logits, Sampling(0.0, 2, 0.1), torch.Generator()) == 1


def test_of_equally_likely_tokens_top_k_keeps_as_many_as_asked() -> None:
    logits, generator = torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0]), torch.Generator().manual_seed(0)
    drawn = {choose(logits, Sampling(1.0, 2), generator) for _ in range(200)}
    assert len(drawn) == 2
    assert drawn < {1, 2, 3}


def test_training_can_use_what_sampling_left_behind() -> None:
    state = {name: value.clone().requires_grad_() for name, value in random_state(LLAMA, 1).items()}
    greedy(LLAMA, state, [1, 2, 3], 3)
    tokens = torch.arange(LLAMA.context_length)[None]
    loss_sums(LLAMA, state, tokens, tokens, torch.float32).backward()
    assert all(value.grad is not None for value in state.values())
