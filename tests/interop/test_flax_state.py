"""Flat flax states: a real flax.nnx GPT-2 takes ours and gives us its own; what is no array is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from nnx_gpt2 import GPT2, jax, jnp, nnx

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.interop.flax_state import flax_config, save_flat
from tiny_llm.interop.pretrained import open_pretrained
from tiny_llm.interop.tensors import WEIGHTS, ExchangeError, converted, read_tensors, write_tensors
from tiny_llm.interop.translation import flax_pieces, to_theirs
from tiny_llm.models.decoder import Decoder


def model(tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=61, layers=2, width=32, heads=4, ffn_width=48, context_length=16, rope_theta=1e4,
        norm_eps=1e-5, init_std=0.02, norm="layernorm", mlp="gelu", positions="learned", qkv_bias=True,
        output_bias=True, mlp_bias=True, tied=tied,
    )  # fmt: skip


def flax_model(tied: bool) -> GPT2:
    """The module without weights: shapes alone, which costs no compilation."""
    return nnx.eval_shape(lambda: GPT2(61, 16, 32, 4, 2, 48, tied))


def flax_logits(gpt2: GPT2) -> np.ndarray:
    return np.asarray(nnx.jit(lambda module, tokens: module(tokens))(gpt2, jnp.asarray(TOKENS)))


def random_weights(tied: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.3 + (1.0 if spec.std is None else 0.0)
        for spec in parameter_specs(model(tied))
    }


def logits(tied: bool, weights: dict[str, torch.Tensor], tokens: np.ndarray) -> np.ndarray:
    decoder = Decoder(model(tied))
    decoder.load_state_dict(weights)
    return decoder(torch.from_numpy(tokens)).detach().numpy()


def write_directory(directory: Path, tied: bool, weights: dict[str, torch.Tensor]) -> None:
    write_tensors(directory / WEIGHTS, to_theirs(flax_pieces(model(tied)), weights))
    (directory / "config.json").write_text(json.dumps(flax_config(model(tied))))


TOKENS = np.random.default_rng(0).integers(0, 61, (3, 16))


@pytest.mark.parametrize("tied", [True, False])
def test_a_real_nnx_gpt2_with_our_weights_gives_our_logits(tied: bool, tmp_path: Path) -> None:
    from safetensors.flax import load_file

    weights = random_weights(tied)
    write_directory(tmp_path, tied, weights)
    gpt2 = flax_model(tied)
    arrays = load_file(tmp_path / WEIGHTS)
    state = nnx.state(gpt2, nnx.Param)
    flat = nnx.to_flat_state(state)
    assert {".".join(map(str, path)): variable.shape for path, variable in flat} == {
        name: value.shape for name, value in arrays.items()
    }
    for path, variable in flat:
        variable.set_value(arrays[".".join(map(str, path))])
    nnx.update(gpt2, state)
    expected = logits(tied, weights, TOKENS)
    assert expected.std() > 0.5
    assert np.abs(flax_logits(gpt2) - expected).max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_a_real_nnx_gpt2_comes_back_as_ours(tied: bool, tmp_path: Path) -> None:
    gpt2 = flax_model(tied)
    state = nnx.state(gpt2, nnx.Param)
    generator = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(state):
        variable.set_value(jnp.asarray(0.3 * generator.standard_normal(variable.shape), jnp.float32))
    nnx.update(gpt2, state)
    save_flat(nnx.to_flat_state(state), tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(flax_config(model(tied))))
    weights = open_pretrained(tmp_path).weights
    expected = flax_logits(gpt2)
    assert expected.std() > 0.1
    assert np.abs(logits(tied, weights, TOKENS) - expected).max() < 1e-4


def test_every_precision_passes_through_jax(tmp_path: Path) -> None:
    from safetensors.flax import load_file

    for dtype in ("fp32", "fp16", "bf16"):
        weights = converted(random_weights(True), dtype)
        write_tensors(tmp_path / WEIGHTS, to_theirs(flax_pieces(model(True)), weights))
        save_flat(load_file(tmp_path / WEIGHTS), tmp_path / "again.safetensors")
        (tmp_path / "again.safetensors").replace(tmp_path / WEIGHTS)
        for name, value in to_theirs(flax_pieces(model(True)), weights).items():
            found = read_tensors(tmp_path)[name]
            assert found.dtype == value.dtype
            assert torch.equal(found, value)


def test_nested_and_other_entries_are_named(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    bad = {
        "layers": {"0": {"kernel": jnp.ones(2)}},
        ("norm", "scale"): None,
        ("act",): jax.nn.gelu,
        ("note",): "text",
        ("rngs", "key"): jax.random.key(0),
        ("fine", 0, "kernel"): jnp.ones(2),
        ("layers", 1): np.array([object()]),
    }
    with pytest.raises(ExchangeError) as error:
        save_flat(bad, path)
    message = str(error.value)
    for words in (
        "'layers' is nested (in it: 0)",
        "'norm.scale' is a NoneType",
        "'act' is a ",
        "'note' is a str",
    ):
        assert words in message
    assert "'rngs.key' is a " in message
    assert "'layers.1' is a ndarray" in message
    assert "fine" not in message
    assert not path.exists()


def test_two_paths_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"'a.0' is there twice"):
        save_flat({("a", 0): np.ones(1), ("a", "0"): np.ones(1)}, tmp_path / WEIGHTS)


def test_a_whole_nnx_state_names_what_to_leave_out(tmp_path: Path) -> None:
    state = nnx.state(nnx.Dropout(0.1, rngs=nnx.Rngs(0)))
    with pytest.raises(ExchangeError, match=r"'rngs.key' is a .*, no array"):
        save_flat(nnx.to_flat_state(state), tmp_path / WEIGHTS)


def test_a_directory_of_another_shape_lists_what_does_not_fit(tmp_path: Path) -> None:
    write_directory(tmp_path, True, random_weights(True))
    tensors = read_tensors(tmp_path)
    tensors["layers.0.mlp.up.kernel"] = tensors["layers.0.mlp.up.kernel"].mT  # as PyTorch has it
    write_tensors(tmp_path / WEIGHTS, tensors)
    with pytest.raises(ExchangeError, match=r"layers.0.mlp.up.kernel is \[48, 32\], not \[32, 48\]"):
        open_pretrained(tmp_path)
