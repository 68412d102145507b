"""The decoder against the plain Llama of reference/llama.py: hidden states, losses and every gradient."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tiny_llm.config.parameters import count_parameters, parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import cpu_attention
from tiny_llm.models import operations as op
from tiny_llm.models.decoder import Decoder, decoder_block, hidden_states, loss_sums
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.packed import local_mean_losses

sys.path.append(str(Path(__file__).parents[1]))
from reference.llama import ReferenceLlama, reference_llama
from reference.small import apart, one_thread, random_packed, random_state  # noqa: F401

N, B = 3, 2
MODELS = {
    "one-layer": ModelConfig(
        vocab_size=61, layers=1, width=16, heads=2, ffn_width=24, context_length=9,
        rope_theta=10000.0, norm_eps=1e-5, init_std=0.02,
    ),
    "three-layers": ModelConfig(
        vocab_size=37, layers=3, width=24, heads=3, ffn_width=20, context_length=7,
        rope_theta=77.0, norm_eps=0.05, init_std=0.02,
    ),
}  # fmt: skip
PRECISIONS = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
BLOCKS = [64, 8 * 61 * 5, 2**26]  # bytes of logits: a target at a time, a few, all
by_precision = pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["fp64", "fp32"])
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def rows(model: ModelConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets [N, B, T], ignored targets falling unevenly on the workers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (N, B, model.context_length)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    targets = torch.randint(model.vocab_size, shape, generator=generator)
    targets[0, 0, 2:] = targets[1, 1, :3] = targets[1, 0, -1] = op.IGNORED
    return tokens, targets


@by_model
def test_names_and_shapes_are_those_of_the_plain_model(model: ModelConfig) -> None:
    expected = {name: tuple(value.shape) for name, value in ReferenceLlama(model).named_parameters()}
    assert {spec.name: spec.shape for spec in parameter_specs(model)} == expected
    assert {name: tuple(value.shape) for name, value in Decoder(model).state_dict().items()} == expected
    assert count_parameters(model) == sum(value.numel() for value in ReferenceLlama(model).parameters())


@pytest.mark.parametrize("block_bytes", BLOCKS)
@by_precision
@by_model
def test_one_model_equals_the_plain_llama(
    model: ModelConfig,
    dtype: torch.dtype,
    tolerance: float,
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "LOGIT_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(cpu_attention, "ROWS", 128 if block_bytes == 2**26 else 4)
    state = random_state(model, 0)
    reference = reference_llama(model, state, dtype)
    decoder = Decoder(model, dtype)
    decoder.load_state_dict(state, strict=True)
    parameters = dict(decoder.named_parameters())
    all_tokens, all_targets = rows(model)
    for tokens, targets in zip(all_tokens, all_targets, strict=True):
        reference.zero_grad()
        decoder.zero_grad()
        expected = reference.loss(tokens, targets)
        expected.backward()  # type: ignore[no-untyped-call]
        loss = loss_sums(model, parameters, tokens, targets, dtype) / (targets != -100).sum()
        loss.backward()

        assert (
            apart(hidden_states(model, parameters, tokens, dtype), reference.hidden_states(tokens))
            < tolerance
        )
        assert apart(decoder(tokens), reference(tokens)) < tolerance
        assert loss.dtype == dtype
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            gradient = parameters[name].grad
            assert gradient is not None
            assert apart(gradient, parameter.grad) < tolerance, name


@pytest.mark.parametrize("block_bytes", BLOCKS)
@by_precision
@by_model
def test_packed_models_equal_plain_llamas(
    model: ModelConfig,
    dtype: torch.dtype,
    tolerance: float,
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "LOGIT_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(cpu_attention, "ROWS", 128 if block_bytes == 2**26 else 4)
    packed = random_packed(model, N, dtype)
    tokens, targets = rows(model)
    states = hidden_states(model, packed.packed(), tokens, dtype)
    logits = packed(tokens)
    losses = local_mean_losses(packed, tokens, targets)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.shape == (N,)
    for i in range(N):
        reference = reference_llama(model, random_state(model, i), dtype)
        expected = reference.loss(tokens[i], targets[i])
        expected.backward()  # type: ignore[no-untyped-call]
        assert apart(states[i], reference.hidden_states(tokens[i])) < tolerance
        assert apart(logits[i], reference(tokens[i])) < tolerance
        assert losses[i].item() == pytest.approx(expected.item(), rel=tolerance)
        gradients = packed.layout.views(packed.gradient_storage[i])
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert apart(gradients[name], parameter.grad) < tolerance, (i, name)


@by_model
def test_bf16_activations_stay_near_the_plain_llama_and_gradients_reach_the_fp32_weights(
    model: ModelConfig,
) -> None:
    packed = random_packed(model, N, torch.float32)
    tokens, targets = rows(model)
    states = hidden_states(model, packed.packed(), tokens, torch.bfloat16)
    losses = local_mean_losses(packed, tokens, targets, torch.bfloat16)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert states.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    for i in range(N):
        reference = reference_llama(model, random_state(model, i), torch.float64)
        expected = reference.loss(tokens[i], targets[i])
        expected.backward()  # type: ignore[no-untyped-call]
        assert apart(states[i], reference.hidden_states(tokens[i])) < 0.05
        assert losses[i].item() == pytest.approx(expected.item(), rel=0.02)
        gradients = packed.layout.views(packed.gradient_storage[i])
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert gradients[name].dtype == torch.float32
            assert apart(gradients[name], parameter.grad) < 0.2, (i, name)


@by_model
def test_a_token_changes_nothing_before_it(model: ModelConfig) -> None:
    decoder = Decoder(model, torch.float64)
    decoder.load_state_dict(random_state(model, 0), strict=True)
    tokens = rows(model)[0][0]
    logits = decoder(tokens)
    for t in range(model.context_length):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % model.vocab_size
        moved = (decoder(changed) - logits).abs().amax((0, 2)) > 1e-12
        assert not moved[:t].any()
        assert moved[t:].all()


def test_a_prefix_gives_the_logits_of_its_part_of_the_whole() -> None:
    model = MODELS["three-layers"]
    decoder = Decoder(model, torch.float64)
    decoder.load_state_dict(random_state(model, 0), strict=True)
    tokens = rows(model)[0][0]
    for length in range(1, model.context_length + 1):
        assert apart(decoder(tokens[:, :length]), decoder(tokens)[:, :length]) < 1e-12


def test_a_look_in_inference_mode_does_not_spoil_training() -> None:
    model = replace(MODELS["one-layer"], rope_theta=1234.5)  # which no other test has met before
    packed = random_packed(model, N, torch.float64)
    tokens, targets = rows(model)
    with torch.inference_mode():
        packed(tokens)
    local_mean_losses(packed, tokens, targets).sum().backward()  # type: ignore[no-untyped-call]
    assert packed.gradient_norms().min() > 0


def test_a_compiled_block_is_made_once_for_all_layers() -> None:
    made = []
    for layers in (1, 3):
        model = replace(MODELS["three-layers"], layers=layers)
        tokens_BT = rows(model)[0][0]
        counter = CompileCounter()
        torch._dynamo.reset()
        block = torch.compile(decoder_block, backend=counter, dynamic=False)
        loss_sums(model, initial_parameters(model, 0), tokens_BT, tokens_BT, torch.float32, block=block)
        made.append(counter.frame_count)
    assert made == [1, 1]
