"""Safetensors: any layout and precision goes out and comes back; damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tiny_llm.interop.tensors import (
    DTYPES,
    INDEX,
    WEIGHTS,
    ExchangeError,
    converted,
    read_tensors,
    write_tensors,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_precision_survives_the_round_trip(dtype: str, tmp_path: Path) -> None:
    weights = converted({"a": torch.randn(5, 7), "b": torch.randn(3)}, dtype)
    write_tensors(tmp_path / WEIGHTS, weights)
    found = read_tensors(tmp_path)
    assert {value.dtype for value in found.values()} == {DTYPES[dtype]}
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_views_transposed_and_shared_tensors_get_bytes_of_their_own(tmp_path: Path) -> None:
    arena = torch.arange(24.0)
    shared = torch.randn(4, 4)
    weights = {
        "row": arena[:6].view(2, 3),
        "overlapping": arena[3:9],
        "transposed": arena.view(4, 6).mT,
        "every-other": arena[::2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "one": shared,
        "two": shared,
        "needs-grad": torch.nn.Parameter(torch.ones(2)),
    }
    write_tensors(tmp_path / WEIGHTS, weights)
    found = read_tensors(tmp_path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value.detach()) for name, value in weights.items())
    assert (tmp_path / WEIGHTS).stat().st_size < 4 * sum(value.numel() for value in weights.values()) + 2000


def test_a_weight_that_half_precision_cannot_hold_is_refused_by_name() -> None:
    weights = {"small": torch.ones(2), "layers.0.large": torch.tensor([1e5])}
    with pytest.raises(
        ExchangeError, match=r"dtype=fp16: weights of up to 100000 .* layers.0.large; use dtype=bf16"
    ):
        converted(weights, "fp16")
    converted(weights, "bf16")
    with pytest.raises(ExchangeError, match=r"not finite: nan"):
        converted({"nan": torch.tensor([float("nan")])}, "fp32")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named(share: float, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    write_tensors(path, {"a": torch.randn(100, 10)})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ExchangeError) as error:
        read_tensors(tmp_path)
    assert str(path) in str(error.value)
    assert "damaged or cut short" in str(error.value)


def test_a_directory_without_weights_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=f"holds no {WEIGHTS}"):
        read_tensors(tmp_path)
    with pytest.raises(ExchangeError, match="does not exist"):
        read_tensors(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ExchangeError, match=r"but pytorch_model.bin; convert it with transformers"):
        read_tensors(tmp_path)


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    write_tensors(tmp_path / "outside.safetensors", {"a": torch.ones(1)})
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(ExchangeError, match="outside its directory"):
        read_tensors(inside)


def test_a_tensor_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "one.safetensors", {"a": torch.ones(1)})
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
    )
    with pytest.raises(ExchangeError, match="no shard holds: b"):
        read_tensors(tmp_path)
