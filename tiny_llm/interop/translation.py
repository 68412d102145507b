"""Parameter names here and elsewhere: a list of pieces that is read in both directions.

A piece says that one tensor of theirs is some rows of one of ours, maybe transposed. Hugging Face keeps q, k, v
and gate, up apart where one matrix holds them here; GPT-2's Conv1D and flax keep [in, out] where Linear keeps
[out, in]. In flow tensors under one naming, out flow the same numbers under the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_llm.config.parameters import ParameterSpec, parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.interop.families import Family
from tiny_llm.interop.tensors import ExchangeError, listed


@dataclass(frozen=True)
class Piece:
    """Tensor `theirs` is rows [start, stop) of our parameter `ours`; `shape` is theirs."""

    theirs: str
    ours: str
    start: int
    stop: int
    shape: tuple[int, ...]
    transposed: bool

    def cut(self, parameter: Tensor) -> Tensor:
        """Return their tensor, a view of our parameter."""
        rows = parameter[self.start : self.stop]
        return rows.mT if self.transposed else rows

    def restored(self, tensor: Tensor) -> Tensor:
        """Return our rows, a view of their tensor."""
        return tensor.mT if self.transposed else tensor


LLAMA_MODULES = {
    "embedding": ("model.embed_tokens",),
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
GPT2_MODULES = {
    "embedding": ("transformer.wte",),
    "positions": ("transformer.wpe",),
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.output": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}


def hf_pieces(family: Family, model: ModelConfig) -> list[Piece]:
    """Return every tensor of a Hugging Face model; `model` as the family expresses it."""
    gpt2 = family.model_type == "gpt2"
    modules, layer = (GPT2_MODULES, "transformer.h") if gpt2 else (LLAMA_MODULES, "model.layers")
    pieces = []
    for spec in parameter_specs(model):
        place, module, leaf = split_name(spec.name)
        prefix = f"{layer}.{place}." if place else ""
        parts = [f"{prefix}{name}.{leaf}" for name in modules[module]]
        transposed = gpt2 and bool(place) and len(spec.shape) == 2
        pieces += _cut(spec, parts, _rows(model, module, spec.shape[0], len(parts)), transposed)
    return pieces


def flax_pieces(model: ModelConfig) -> list[Piece]:
    """Return every entry of a flat flax state: our modules, with the leaves of nnx.Linear, Embed and the norms."""
    pieces = []
    for spec in parameter_specs(model):
        _, module, leaf = split_name(spec.name)
        if leaf == "weight":
            norm = module.endswith("norm")
            leaf = "embedding" if module in ("embedding", "positions") else "scale" if norm else "kernel"
        name = spec.name.rpartition(".")[0] + f".{leaf}"
        pieces += _cut(spec, [name], [spec.shape[0]], leaf == "kernel")
    return pieces


def split_name(name: str) -> tuple[str, str, str]:
    """Return the layer's number (or nothing), the module in it and the leaf of one of our names."""
    parts = name.split(".")
    if parts[0] == "layers":
        return parts[1], ".".join(parts[2:-1]), parts[-1]
    return "", ".".join(parts[:-1]), parts[-1]


def _rows(model: ModelConfig, module: str, rows: int, parts: int) -> list[int]:
    if module == "attention.qkv" and parts == 3:
        return [count * model.head_width for count in (model.heads, model.groups, model.groups)]
    assert rows % parts == 0, (module, rows, parts)
    return [rows // parts] * parts


def _cut(spec: ParameterSpec, names: list[str], rows: list[int], transposed: bool) -> list[Piece]:
    pieces, start = [], 0
    for name, count in zip(names, rows, strict=True):
        shape = (count, *spec.shape[1:])
        pieces.append(
            Piece(name, spec.name, start, start + count, shape[::-1] if transposed else shape, transposed)
        )
        start += count
    assert start == spec.shape[0], spec
    return pieces


def to_theirs(pieces: list[Piece], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return their tensors, views of ours; a bias that we do not have is zeros."""
    some = next(iter(weights.values()))
    return {
        piece.theirs: piece.cut(weights[piece.ours])
        if piece.ours in weights
        else torch.zeros(piece.shape, dtype=some.dtype, device=some.device)
        for piece in pieces
    }


def to_ours(
    pieces: list[Piece], model: ModelConfig, tensors: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Return our parameters from their tensors, in the tensors' dtype.

    A bias that the model does not have may be there if it is zero. Raises ExchangeError that lists every name
    and shape that does not fit.
    """
    wanted = {spec.name for spec in parameter_specs(model)}
    if problems := _problems(pieces, wanted, tensors):
        raise ExchangeError(f"{where} does not fit the model: {listed(problems)}")
    parts: dict[str, list[Tensor]] = {}
    for piece in pieces:
        if piece.ours in wanted:
            parts.setdefault(piece.ours, []).append(piece.restored(tensors[piece.theirs]))
    return {name: torch.cat(rows) for name, rows in parts.items()}


def _problems(pieces: list[Piece], wanted: set[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what is missing, unexpected, of another shape, or not zero where the model has no parameter."""
    found = [f"{name} is unexpected" for name in sorted(set(tensors) - {piece.theirs for piece in pieces})]
    for piece in pieces:
        tensor = tensors.get(piece.theirs)
        if tensor is None:
            found.append(f"{piece.theirs} is missing")
        elif tuple(tensor.shape) != piece.shape:
            found.append(f"{piece.theirs} is {list(tensor.shape)}, not {list(piece.shape)}")
        elif piece.ours not in wanted and tensor.any():
            found.append(f"{piece.theirs} has values but the model no {piece.ours}")
    covered = {piece.ours for piece in pieces}
    return [*found, *(f"{name} has no counterpart there" for name in sorted(wanted - covered))]
