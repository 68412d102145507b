"""Flat flax states as safetensors: one array an entry, its path joined with dots.

What `to=flax` writes loads into a flax.nnx model that names its modules as this decoder does:

    arrays = safetensors.flax.load_file("DIR/model.safetensors")
    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(arrays[".".join(map(str, path))])
    nnx.update(model, state)

and `save_flat(nnx.to_flat_state(state), path)` writes one back, for `init_from=DIR`. Neither jax nor flax is needed
here: arrays come as anything that numpy takes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiny_llm.config.schema import ModelConfig
from tiny_llm.interop.tensors import ExchangeError, listed, write_tensors

MODEL_TYPE = "tiny_llm-flax"


def flax_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a flax directory: this program's own model section."""
    return {"model_type": MODEL_TYPE, "model": dict(vars(model))}


def save_flat(state: Mapping[Any, Any] | Iterable[tuple[Any, Any]], path: Path | str) -> None:
    """Write a flat state, {path: array}, as one safetensors file.

    A path is a tuple such as ("layers", 0, "mlp", "up", "kernel") or that joined with dots; an array may stand in
    an nnx.Variable. Raises ExchangeError naming every entry that is nested, no array, or there twice.
    """
    tensors: dict[str, Tensor] = {}
    problems = []
    for key, value in dict(state).items():
        name = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
        if name in tensors:
            problems.append(f"'{name}' is there twice")
        elif problem := _problem(value := _bare(value)):
            problems.append(f"'{name}' {problem}")
        else:
            tensors[name] = _tensor(value)
    if problems:
        raise ExchangeError(f"this is no flat state of arrays: {listed(problems)}")
    write_tensors(Path(path), tensors)


def _bare(value: Any) -> Any:
    """Return what an nnx.Variable holds; anything else as it is."""
    return value.get_value() if hasattr(value, "get_value") else value


def _problem(value: Any) -> str | None:
    """Say why a value is no array, or return None."""
    if isinstance(value, Mapping):
        keys = ", ".join(str(key) for key in list(value)[:4])
        return f"is nested (in it: {keys}); flatten the state first with flax.nnx.to_flat_state"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = np.asarray(value).dtype
    except Exception as error:  # a JAX PRNG key, an abstract array
        return f"is a {type(value).__name__}, no array of numbers ({str(error).splitlines()[0]})"
    if kind.kind in "biufc" or kind.name == "bfloat16":
        return None
    return f"is a {type(value).__name__}, no array of numbers; keep weights alone with nnx.state(model, nnx.Param)"


def _tensor(value: Any) -> Tensor:
    array = np.array(value)  # a copy: arrays of JAX are read-only
    if array.dtype.name == "bfloat16":  # known to ml_dtypes, not to numpy itself
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def read_flax_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model of a flax directory's config.json."""
    from tiny_llm.config.parse import parse_section

    model = values.get("model")
    if not isinstance(model, Mapping):
        raise ExchangeError(f"{where} has no section 'model': {json.dumps(values)[:80]}")
    return parse_section(ModelConfig, model, f"{where}: model")
