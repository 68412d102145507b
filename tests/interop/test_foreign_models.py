"""Models that transformers built: imported, they give transformers' logits and transformers' gradients."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
from foreign import CLASSES, LENGTH, MODELS, build, saved, tokens, transformers

from tiny_llm.decentralized.packed_llama import PackedLlama, local_mean_losses
from tiny_llm.interop.families import family_of, hf_config, read_config
from tiny_llm.interop.pretrained import open_pretrained, read_model
from tiny_llm.interop.tensors import ExchangeError, read_tensors, write_tensors
from tiny_llm.interop.translation import hf_pieces, to_ours, to_theirs
from tiny_llm.models.decoder import Decoder

every_model = pytest.mark.parametrize("name", MODELS)


def decoder(directory: Path) -> Decoder:
    pretrained = open_pretrained(directory)
    model = Decoder(pretrained.model)
    model.load_state_dict(pretrained.weights)
    return model


@torch.no_grad()
def apart(directory: Path, theirs: object) -> float:
    """The largest difference of a logit between a directory that we read and a model of transformers."""
    inputs, _ = tokens()
    expected = theirs(inputs).logits  # type: ignore[operator]
    assert expected.std() > 0.5, "logits that small prove nothing"
    return float((decoder(directory)(inputs) - expected).abs().max())


@every_model
def test_an_imported_model_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    assert family_of(read_model(tmp_path)).architecture == CLASSES[MODELS[name][0]]
    assert apart(tmp_path, theirs) < 1e-4


@every_model
@pytest.mark.parametrize("workers", [1, 2])
def test_the_gradient_of_every_worker_is_that_of_transformers(
    name: str, workers: int, tmp_path: Path
) -> None:
    theirs = saved(name, tmp_path)
    inputs, targets = tokens()
    logits = theirs(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}

    pretrained = open_pretrained(tmp_path)
    family = family_of(pretrained.model)
    expected = to_ours(hf_pieces(family, pretrained.model), pretrained.model, gradients, "gradients")
    packed = PackedLlama(pretrained.model, workers, seed=0)
    packed.set_all(pretrained.weights)
    losses = local_mean_losses(packed, inputs.expand(workers, -1, -1), targets.expand(workers, -1, -1))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    for i in range(workers):
        assert losses[i].item() == pytest.approx(loss.item(), abs=1e-4)
        ours = packed.layout.views(packed.gradient_storage[i])
        assert ours.keys() == expected.keys()
        for key, gradient in expected.items():
            assert gradient.norm() > 1e-3, f"{key}: a gradient that small proves nothing"
            assert (ours[key] - gradient).abs().max() < 1e-4, key
            assert (ours[key] - gradient).norm() / gradient.norm() < 1e-4, key


@every_model
def test_what_is_imported_is_exported_to_the_last_bit(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    pretrained = open_pretrained(tmp_path / "theirs")
    family = family_of(pretrained.model)
    ours = tmp_path / "ours"
    ours.mkdir()
    write_tensors(
        ours / "model.safetensors", to_theirs(hf_pieces(family, pretrained.model), pretrained.weights)
    )
    (ours / "config.json").write_text(json.dumps(hf_config(pretrained.model)))
    expected, found = read_tensors(tmp_path / "theirs"), read_tensors(ours)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not info["missing_keys"], info
    assert type(again) is type(theirs)
    assert apart(ours, again) < 1e-4


def openai_layout(directory: Path, prefix: str, masks: bool, head: bool) -> object:
    """Save GPT-2 as OpenAI's directory on the Hub has it: bare names, causal masks, few keys in config.json."""
    theirs = saved("gpt2", directory)
    tensors = {
        f"{prefix}{key.removeprefix('transformer.')}": value for key, value in read_tensors(directory).items()
    }
    if masks:
        for layer in range(2):
            tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH).tril()
            tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    if head:
        tensors["lm_head.weight"] = tensors[f"{prefix}wte.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    values = {"model_type": "gpt2", "n_ctx": LENGTH, "n_positions": LENGTH, "n_embd": 32, "n_head": 4}
    values |= {"n_layer": 2, "vocab_size": 61, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    (directory / "config.json").write_text(json.dumps(values))
    return theirs


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize(("masks", "head"), [(True, False), (False, True)])
def test_openais_gpt2_is_read_as_it_was_published(
    prefix: str, masks: bool, head: bool, tmp_path: Path
) -> None:
    assert apart(tmp_path, openai_layout(tmp_path, prefix, masks, head)) < 1e-4


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    openai_layout(tmp_path, "transformer.", False, True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExchangeError, match=r"lm_head.weight differs from the embedding.*model.tied=false"):
        open_pretrained(tmp_path)


def test_another_model_is_refused_with_every_key_that_differs(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    model = replace(read_model(tmp_path), layers=3, width=48, qk_norm=False, rope_theta=5.0)
    with pytest.raises(ExchangeError) as error:
        open_pretrained(tmp_path, model)
    for words in (
        "model.layers=3 (there 2)",
        "model.width=48 (there 32)",
        "model.qk_norm=false (there true)",
        "model.rope_theta=5.0 (there 10000.0)",
    ):
        assert words in str(error.value)
    assert "model.heads" not in str(error.value)


def test_the_context_may_differ_where_positions_have_no_weights(tmp_path: Path) -> None:
    saved("llama", tmp_path / "llama")
    shorter = replace(read_model(tmp_path / "llama"), context_length=7)
    assert open_pretrained(tmp_path / "llama", shorter).model.context_length == 7
    saved("gpt2", tmp_path / "gpt2")
    shorter = replace(read_model(tmp_path / "gpt2"), context_length=7)
    with pytest.raises(ExchangeError, match=r"model.context_length=7 \(there 16\)"):
        open_pretrained(tmp_path / "gpt2", shorter)


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    tensors = read_tensors(tmp_path)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(41, 32)
    tensors["model.layers.9.extra"] = torch.ones(2)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExchangeError) as error:
        open_pretrained(tmp_path)
    for words in (
        "model.layers.0.mlp.up_proj.weight is [41, 32], not [40, 32]",
        "model.layers.9.extra is unexpected",
        "model.norm.weight is missing",
    ):
        assert words in str(error.value)


def test_a_bias_with_values_that_the_model_lacks_is_never_dropped(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    model = replace(read_model(tmp_path), qkv_bias=False)
    with pytest.raises(
        ExchangeError, match=r"h.1.attn.c_attn.bias has values but the model no layers.1.attention.qkv"
    ):
        open_pretrained(tmp_path, model)
    tensors = read_tensors(tmp_path)
    for layer in range(2):
        tensors[f"transformer.h.{layer}.attn.c_attn.bias"].zero_()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "layers.0.attention.qkv.bias" not in open_pretrained(tmp_path, model).weights


def test_a_bias_that_the_directory_lacks_is_listed(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ExchangeError, match=r"layers.0.attention.qkv.bias has no counterpart there"):
        open_pretrained(tmp_path, replace(read_model(tmp_path), qkv_bias=True))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling="),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type=llama3"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=sliding_attention"),
        ("gpt2", {"activation_function": "relu"}, "activation_function=relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
        ("gpt2", {"model_type": "mamba"}, "model_type='mamba'; this program reads llama, qwen3, gpt2"),
    ],
)
def test_what_this_decoder_does_not_compute_is_refused_by_name(
    name: str, change: dict[str, object], words: str, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ExchangeError) as error:
        open_pretrained(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
def test_keys_that_an_older_transformers_leaves_out_have_its_defaults(family: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    _, whole = read_config(config.to_dict(), "whole")
    _, bare = read_config({"model_type": config.model_type}, "bare")
    assert replace(bare, head_dim=bare.head_width, kv_heads=bare.groups) == replace(
        whole, head_dim=whole.head_width, kv_heads=whole.groups
    )


def test_shards_are_followed_and_a_missing_one_is_named(tmp_path: Path) -> None:
    theirs = build("qwen3")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert apart(tmp_path, theirs) < 1e-4
    shards[1].unlink()
    with pytest.raises(ExchangeError, match=shards[1].name):
        open_pretrained(tmp_path)


def test_half_precision_directories_are_read_into_fp32(tmp_path: Path) -> None:
    theirs = build("gpt2").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    weights: dict[str, Tensor] = open_pretrained(tmp_path).weights
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert torch.equal(weights["embedding.weight"], theirs.transformer.wte.weight.float())
