"""GPT-2, Qwen3 and mixtures of their switches against the slow twins of reference/families.py."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models.decoder import Decoder, hidden_states, loss_sums
from tiny_llm.models.dropout import dropout_keys
from tiny_llm.packed import local_mean_losses

sys.path.append(str(Path(__file__).parents[1]))
from reference.families import Dropped, ReferenceFamily, factors
from reference.small import apart, one_thread, random_packed, random_state  # noqa: F401

N, B = 3, 2
LLAMA = ModelConfig(
    vocab_size=31, layers=2, width=16, heads=4, ffn_width=20, context_length=6,
    rope_theta=50.0, norm_eps=1e-3, init_std=0.02,
)  # fmt: skip
GPT2 = replace(
    LLAMA, norm="layernorm", mlp="gelu", positions="learned", output_bias=True, mlp_bias=True, tied=False
)
QWEN3 = replace(LLAMA, qk_norm=True, tied=False, head_dim=6)


def mixture(seed: int) -> ModelConfig:
    """A Llama with every switch thrown at random."""
    draw = random.Random(seed)
    switches = {
        name: draw.random() < 0.5 for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tied")
    }
    return replace(
        LLAMA,
        norm=draw.choice(("rmsnorm", "layernorm")), mlp=draw.choice(("swiglu", "gelu")),
        positions=draw.choice(("rope", "learned")), kv_heads=draw.choice((None, 1, 2, 4)),
        head_dim=draw.choice((None, 2, 8)), **switches,
    )  # fmt: skip


MODELS = {
    "gpt2": GPT2,
    "openai-gpt2": replace(GPT2, qkv_bias=True, tied=True),
    "qwen3": QWEN3,
    "qwen3-groups": replace(QWEN3, kv_heads=2),
    "llama-one-group-odd-heads": replace(LLAMA, heads=3, head_dim=4, kv_heads=1),
    "gpt2-odd-head-dim": replace(GPT2, head_dim=5, kv_heads=2),
    **{f"mixture-{seed}": mixture(seed) for seed in range(5)},
}
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
by_dropout = pytest.mark.parametrize("rate", [0.0, 0.3])


def rows(model: ModelConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets [N, B, T], ignored targets falling unevenly on the workers."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(model.vocab_size, (2, N, B, model.context_length), generator=generator)
    targets[0, 0, 2:] = targets[1, 1, :3] = -100
    return tokens, targets


def keys_of(model: ModelConfig) -> Tensor | None:
    return dropout_keys(model, 42, 7, 1, range(N)) if model.dropout else None


def dropped(model: ModelConfig, keys: Tensor | None, i: int) -> Dropped | None:
    """What the twin multiplies by, from worker i's keys [places, 2]."""
    if keys is None:
        return None
    return lambda place, shape: factors(tuple(keys[i, place].tolist()), model.dropout, shape)  # type: ignore[arg-type]


def twin(model: ModelConfig, i: int, keys: Tensor | None) -> ReferenceFamily:
    """Worker i's twin, with gradients."""
    state = {name: value.requires_grad_() for name, value in random_state(model, i).items()}
    return ReferenceFamily(model, state, dropped(model, keys, i))


def assert_equal(
    loss: Tensor, gradients: dict[str, Tensor], reference: ReferenceFamily, expected: Tensor
) -> None:
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert gradients.keys() == reference.state.keys()
    for name, value in reference.state.items():
        assert value.grad is not None, name
        assert value.grad.any(), name
        assert apart(gradients[name], value.grad) < 1e-10, name


@by_dropout
@by_model
def test_one_model_equals_its_twin_in_loss_and_every_gradient(model: ModelConfig, rate: float) -> None:
    model = replace(model, dropout=rate)
    keys = keys_of(model)
    tokens, targets = rows(model)
    for i in range(N):
        decoder = Decoder(model, torch.float64)
        decoder.load_state_dict(random_state(model, i), strict=True)
        parameters = dict(decoder.named_parameters())
        own = None if keys is None else keys[i]
        loss = loss_sums(model, parameters, tokens[i], targets[i], torch.float64, own)
        loss = loss / (targets[i] != -100).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        reference = twin(model, i, keys)
        expected = reference.loss(tokens[i], targets[i])
        expected.backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
        assert_equal(loss, gradients, reference, expected)
        plain = ReferenceFamily(model, random_state(model, i))
        assert apart(decoder(tokens[i]), plain.logits(tokens[i])) < 1e-10, "no dropout outside training"


@by_dropout
@by_model
def test_packed_models_equal_their_twins_in_loss_and_every_gradient(model: ModelConfig, rate: float) -> None:
    model = replace(model, dropout=rate)
    keys = keys_of(model)
    tokens, targets = rows(model)
    packed = random_packed(model, N, torch.float64)
    losses = local_mean_losses(packed, tokens, targets, dropout_keys=keys)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    logits = packed(tokens)
    for i in range(N):
        reference = twin(model, i, keys)
        expected = reference.loss(tokens[i], targets[i])
        expected.backward()  # type: ignore[no-untyped-call]
        assert_equal(losses[i], packed.layout.views(packed.gradient_storage[i]), reference, expected)
        assert apart(logits[i], ReferenceFamily(model, random_state(model, i)).logits(tokens[i])) < 1e-10


@by_model
def test_bf16_activations_stay_near_the_twin(model: ModelConfig) -> None:
    model = replace(model, dropout=0.2)
    keys = keys_of(model)
    tokens, targets = rows(model)
    packed = random_packed(model, N, torch.float32)
    losses = local_mean_losses(packed, tokens, targets, torch.bfloat16, keys)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert packed.gradient_storage.isfinite().all()
    for i in range(N):
        expected = twin(model, i, keys).loss(tokens[i], targets[i])
        assert losses[i].item() == pytest.approx(expected.item(), rel=0.03)


@by_model
def test_names_are_those_of_the_single_model_and_padding_is_zero(model: ModelConfig) -> None:
    packed = random_packed(model, N, torch.float32)
    names = [spec.name for spec in parameter_specs(model)]
    assert sorted(Decoder(model).state_dict()) == sorted(names)
    for i in range(N):
        assert list(packed.local_state_dict(i)) == names
        for view in packed.layout.views(packed.parameter_storage[i]).values():
            view.zero_()
    assert not packed.parameter_storage.any()


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    for model in MODELS.values():
        for spec in parameter_specs(model):
            assert spec.decays == (len(spec.shape) == 2) == (not spec.name.endswith((".bias", "norm.weight")))


@pytest.mark.parametrize("model", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
def test_a_token_changes_nothing_before_it(model: ModelConfig) -> None:
    state, tokens = random_state(model, 0), rows(model)[0][0]
    x = hidden_states(model, state, tokens, torch.float64)
    for t in range(model.context_length):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % model.vocab_size
        moved = (hidden_states(model, state, changed, torch.float64) - x).abs().amax((0, 2)) > 1e-12
        assert not moved[:t].any()
        assert moved[t:].all()
