"""The values of a config decide its class of transformers, whatever the preset was called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tiny_llm.config.compose import compose
from tiny_llm.config.parameters import count_parameters, parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.interop.families import family_of, hf_config, read_config
from tiny_llm.interop.tensors import ExchangeError
from tiny_llm.interop.translation import hf_pieces, to_ours, to_theirs


def preset(name: str, **changes: Any) -> ModelConfig:
    return replace(compose([f"model={name}"]).config().model, **changes)


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        (preset("tiny"), "LlamaForCausalLM"),
        (preset("tiny", tied=False, kv_heads=1, head_dim=8), "LlamaForCausalLM"),
        (preset("tiny", qk_norm=True), "Qwen3ForCausalLM"),
        (preset("qwen3-v2"), "Qwen3ForCausalLM"),
        (preset("qwen3-v2", qk_norm=False), "LlamaForCausalLM"),
        (preset("gpt2-small"), "GPT2LMHeadModel"),
        (preset("gpt2-medium", tied=True, qkv_bias=True), "GPT2LMHeadModel"),
    ],
)
def test_a_config_finds_its_class(model: ModelConfig, architecture: str) -> None:
    assert family_of(model).architecture == architecture
    assert hf_config(model)["architectures"] == [architecture]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (preset("gpt2-small", positions="rope"), "GPT2LMHeadModel has no model.positions=rope"),
        (preset("gpt2-small", norm="rmsnorm"), "GPT2LMHeadModel has no model.norm=rmsnorm"),
        (preset("gpt2-small", kv_heads=4), "GPT2LMHeadModel has no model.kv_heads=4"),
        (preset("gpt2-small", head_dim=32), "GPT2LMHeadModel has no model.head_dim=32"),
        (preset("tiny", mlp="gelu"), "LlamaForCausalLM has no model.mlp=gelu;"),
        (preset("tiny", qk_norm=True, mlp_bias=True), "Qwen3ForCausalLM has no model.mlp_bias=true"),
    ],
)
def test_what_no_class_computes_is_refused_by_name(model: ModelConfig, words: str) -> None:
    with pytest.raises(ExchangeError) as error:
        family_of(model)
    assert words in str(error.value)
    assert "use to=flax" in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "tensors"),
    [
        ("qwen3-v2", {}, 135),  # 12 layers of 11, embedding, norm, head
        ("tiny", {"tied": True}, 3 * 9 + 2),
        ("tiny", {"tied": False}, 3 * 9 + 3),
        ("tiny", {"qkv_bias": True}, 3 * (9 + 4) + 2),  # its class biases all four projections or none
        ("gpt2-small", {"tied": True}, 12 * 12 + 4),
        ("gpt2-small", {}, 12 * 12 + 5),
    ],
)
def test_every_tensor_of_the_class_is_there_once(name: str, changes: dict[str, Any], tensors: int) -> None:
    model = preset(name, **changes)
    family = family_of(model)
    pieces = hf_pieces(family, family.expressed(model))
    assert len(pieces) == len({piece.theirs for piece in pieces}) == tensors
    assert not [piece.theirs for piece in pieces if "_orig_mod" in piece.theirs]
    biases = count_parameters(family.expressed(model)) - count_parameters(model)
    assert sum(torch.Size(piece.shape).numel() for piece in pieces) == count_parameters(model) + biases


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"output_bias": True},
        {"mlp_bias": True, "kv_heads": 1},
        {"qk_norm": True, "output_bias": True, "head_dim": 6},
        {"norm": "layernorm", "mlp": "gelu", "positions": "learned"},
        {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "tied": False, "output_bias": True},
    ],
)
def test_names_there_and_back_change_nothing(changes: dict[str, Any]) -> None:
    model = preset("tiny", layers=2, width=12, heads=3, ffn_width=10, vocab_size=300, **changes)
    family = family_of(model)
    pieces = hf_pieces(family, family.expressed(model))
    weights = {spec.name: torch.randn(spec.shape) for spec in parameter_specs(model)}
    theirs = to_theirs(pieces, weights)
    assert {piece.theirs: tuple(theirs[piece.theirs].shape) for piece in pieces} == {
        piece.theirs: piece.shape for piece in pieces
    }
    back = to_ours(pieces, model, theirs, "weights")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())
    family_again, read = read_config(hf_config(model), "config.json")
    assert family_again is family
    assert replace(family.expressed(model), kv_heads=model.groups, head_dim=model.head_width) == replace(
        read, kv_heads=read.groups, head_dim=read.head_width, rope_theta=model.rope_theta
    )
