"""A directory of trained weights as a model of this program: what `init_from=DIR` reads.

In flow a directory with config.json and safetensors: LlamaForCausalLM, Qwen3ForCausalLM or GPT2LMHeadModel as
transformers' save_pretrained or OpenAI wrote it, or what `tiny_llm.export` wrote (to=hf and to=flax). Out flow its
`ModelConfig` and fp32 weights by our names. Nothing is guessed: a setting, name or shape that does not fit is listed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_llm import files
from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.interop.families import Family, differences, read_config
from tiny_llm.interop.flax_state import MODEL_TYPE, read_flax_config
from tiny_llm.interop.tensors import ExchangeError, read_tensors
from tiny_llm.interop.translation import Piece, flax_pieces, hf_pieces, to_ours

# Constants that older versions of transformers saved beside the weights.
BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Pretrained:
    """A model and its weights: fp32, on the CPU, under our names."""

    directory: Path
    model: ModelConfig
    weights: dict[str, Tensor]

    def identity(self) -> str:
        """Return the SHA-256 of the weights, whatever form they were stored in."""
        digest = hashlib.sha256()
        for name, value in sorted(self.weights.items()):
            digest.update(name.encode())
            digest.update(value.contiguous().numpy().data)
        return digest.hexdigest()


def open_pretrained(directory: Path | str, wanted: ModelConfig | None = None) -> Pretrained:
    """Read a directory of weights. Raises ExchangeError.

    wanted: the model that the weights are for; None takes that of config.json. The context may differ where
    positions are rotated: they have no weights.
    """
    directory = Path(directory)
    family, theirs = _read_config(directory)
    model = wanted or theirs
    if differing := differences(model, theirs):
        raise ExchangeError(f"init_from={directory} is another model: {', '.join(differing)}")
    pieces = hf_pieces(family, theirs) if family else flax_pieces(theirs)
    tensors = read_tensors(directory)
    if family:
        tensors = _without_duplicates(_plain_names(tensors, family), pieces, directory)
    weights = to_ours(pieces, model, tensors, f"init_from={directory}")
    order = [spec.name for spec in parameter_specs(model)]
    return Pretrained(directory, model, {name: weights[name].to(torch.float32) for name in order})


def _read_values(directory: Path) -> dict[str, Any]:
    """Return a directory's config.json."""
    path = directory / "config.json"
    if not path.is_file():
        raise ExchangeError(
            f"{directory} holds no config.json; name a directory that transformers' save_pretrained or "
            "tiny_llm.export wrote"
        )
    values = files.read_json(path)
    if not isinstance(values, dict):
        raise ExchangeError(f"{path} is damaged: it holds no mapping")
    return values


def read_model(directory: Path) -> ModelConfig:
    """Return the model of a directory's config.json."""
    return _read_config(directory)[1]


def _read_config(directory: Path) -> tuple[Family | None, ModelConfig]:
    """Return the family (none: a flax state) and the model of a directory."""
    values, where = _read_values(directory), str(directory / "config.json")
    if values.get("model_type") == MODEL_TYPE:
        return None, read_flax_config(values, where)
    return read_config(values, where)


def _plain_names(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Return tensors under the names of the class with the head; OpenAI's GPT-2 leaves `transformer.` out."""
    bare = family.model_type == "gpt2" and not any(name.startswith("transformer.") for name in tensors)
    return {
        f"transformer.{name}" if bare and not name.startswith("lm_head.") else name: value
        for name, value in tensors.items()
        if not BUFFERS.search(name)
    }


def _without_duplicates(
    tensors: dict[str, Tensor], pieces: list[Piece], directory: Path
) -> dict[str, Tensor]:
    """Return tensors without a head that repeats the embedding it is tied to."""
    if any(piece.ours == "head.weight" for piece in pieces) or "lm_head.weight" not in tensors:
        return tensors
    embedding = tensors.get(next(piece.theirs for piece in pieces if piece.ours == "embedding.weight"))
    if embedding is None or not torch.equal(embedding, tensors["lm_head.weight"]):
        raise ExchangeError(
            f"{directory}: lm_head.weight differs from the embedding, but config.json says tie_word_embeddings; "
            "set it to false there, and model.tied=false"
        )
    return {name: value for name, value in tensors.items() if name != "lm_head.weight"}


def check_vocabulary(directory: Path, tokenizer: Tokenizer, whose: str) -> None:
    """Raise ExchangeError if a directory has a tokenizer that gives other ids than `tokenizer`."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    theirs, ours = Tokenizer.from_file(str(path)).get_vocab(), tokenizer.get_vocab()
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    if differing:
        raise ExchangeError(
            f"{path} is another tokenizer than that of {whose}: {len(differing):,} tokens have other ids, such as "
            f"{differing[0]!r}; use data.tokenizer={path}, or remove that file where the ids are meant to differ"
        )
