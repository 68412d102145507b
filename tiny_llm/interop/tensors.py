"""Weights as safetensors: whole files out, and in again with every damage named.

In flow tensors of any layout (views of one arena, transposed, shared); out flow files in which each name has
bytes of its own and the file has their SHA-256, which is compared when they are read again. Reading follows a
`model.safetensors.index.json` to its shards. Nothing here knows what the names mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tiny_llm import files
from tiny_llm.config.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKSUM = "tiny_llm_sha256"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class ExchangeError(UserError):
    """Weights or a directory that cannot be read, written or expressed; the message names the cause."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Publish tensors as they are, each with its own bytes, on the CPU and in the format of PyTorch."""
    own = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    content = save(own, {"format": "pt", **(metadata or {}), CHECKSUM: checksum(own)})
    files.write_whole(path, lambda file: file.write(content))


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and contiguous bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def converted(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return tensors in fp32, fp16 or bf16. Raises ExchangeError where a finite weight would become infinite."""
    target = DTYPES[dtype]
    result = {name: value.detach().to(target) for name, value in tensors.items()}
    broken = [name for name, value in result.items() if not torch.isfinite(value).all()]
    if not broken:
        return result
    if any(not torch.isfinite(tensors[name]).all() for name in broken):
        raise ExchangeError(f"weights are not finite: {listed(broken)}; choose an earlier checkpoint")
    largest = max(float(tensors[name].abs().max()) for name in broken)
    raise ExchangeError(
        f"dtype={dtype}: weights of up to {largest:g} do not fit, the largest number is "
        f"{torch.finfo(target).max:g}, in {listed(broken)}; use dtype=bf16 or fp32"
    )


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a directory's safetensors. Raises ExchangeError for what is missing or damaged."""
    if (directory / INDEX).is_file():
        return _read_shards(directory)
    if not (directory / WEIGHTS).is_file():
        raise ExchangeError(f"{directory} holds no {WEIGHTS}{_other_weights(directory)}")
    return read_file(directory / WEIGHTS)


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file. Raises ExchangeError for other bytes than those written."""
    if not path.is_file():
        raise ExchangeError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            written = (file.metadata() or {}).get(CHECKSUM)
    except (SafetensorError, OSError):
        raise ExchangeError(f"{path} is damaged or cut short; fetch or export it again") from None
    if written not in (None, checksum(tensors)):
        raise ExchangeError(
            f"{path} is damaged: its bytes are not those that were written; restore a copy of it"
        )
    return tensors


def _read_shards(directory: Path) -> dict[str, Tensor]:
    index = files.read_json(directory / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ExchangeError(f"{directory / INDEX} is damaged: it has no weight_map")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, places.values()))):
        if Path(name).name != name:
            raise ExchangeError(f"{directory / INDEX} names a shard outside its directory: {name}")
        tensors |= read_file(directory / name)
    if absent := sorted(set(places) - set(tensors)):
        raise ExchangeError(f"{directory / INDEX} names tensors that no shard holds: {listed(absent)}")
    return tensors


def _other_weights(directory: Path) -> str:
    if not directory.is_dir():
        return ", it does not exist"
    if found := sorted(path.name for path in directory.glob("pytorch_model*.bin")):
        return (
            f" but {found[0]}; convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER)"
        )
    return "; name a directory that transformers' save_pretrained or tiny_llm.export wrote"


def listed(names: list[str], most: int = 20) -> str:
    """Return names as one line, the first `most` of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
