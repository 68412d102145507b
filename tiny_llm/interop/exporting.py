"""From a run directory to a directory that other programs open; the door is `tiny_llm.export`.

    model.safetensors        weights: of a Hugging Face class (to=hf), or a flat flax state (to=flax)
    config.json              generation_config.json (to=hf)
    tokenizer.json, tokenizer_config.json
    README.md                the model card: recipe, data, results

Everything is written beside the final name, verified there and then renamed, so the directory is whole or absent
and never holds weights that failed their verification.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from tiny_llm import files
from tiny_llm.config.parameters import parameter_specs
from tiny_llm.data.cache import TOKENIZER, TokenCache
from tiny_llm.data.publication import locked, staged
from tiny_llm.interop.card import model_card
from tiny_llm.interop.families import family_of, hf_config
from tiny_llm.interop.flax_state import flax_config
from tiny_llm.interop.run_facts import RunFacts, run_facts
from tiny_llm.interop.tensors import DTYPES, WEIGHTS, ExchangeError, converted, read_tensors, write_tensors
from tiny_llm.interop.translation import Piece, flax_pieces, hf_pieces, split_name, to_theirs
from tiny_llm.interop.verification import Verdict, VerificationError, require_transformers, verify
from tiny_llm.training.saved_run import SavedRun, open_run

Target = Literal["hf", "flax"]
Dtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Request:
    """What to export, in which form, and whether to compare it with transformers."""

    run: str
    checkpoint: str | None
    worker: int | None
    to: Target
    dtype: Dtype
    verify: bool
    device: str


@dataclass(frozen=True)
class Exported:
    """What was exported, as facts and as lines for a user."""

    facts: RunFacts
    lines: list[str]


def export(request: Request, out: Path) -> Exported:
    """Publish an export as the directory `out`. Raises ExchangeError, VerificationError and other UserErrors."""
    refuse_existing(out)
    if request.verify and request.to == "hf":
        require_transformers()
    with locked(out, None), staged(out) as staging:
        refuse_existing(out)
        return write_export(request, staging)


def refuse_existing(out: Path) -> None:
    """Raise ExchangeError unless `out` is free: absent, or an empty directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ExchangeError(f"out={out} exists already; remove it or choose another directory")


def write_export(request: Request, directory: Path) -> Exported:
    """Fill an empty directory with an export and verify it there."""
    saved = open_run(request.run, request.checkpoint, request.device, request.worker)
    facts = run_facts(Path(request.run), saved, request.worker)
    form = _hf_form(saved, request.dtype) if request.to == "hf" else _flax_form(saved)
    for name, values in form.pages.items():
        files.write_json(directory / name, values)
    write_tokenizer(directory, saved.cache, saved.config.model.context_length)
    tensors = to_theirs(form.pieces, converted(saved.weights, request.dtype))
    write_tensors(directory / WEIGHTS, tensors)
    lines = [
        f"{form.kind}, {facts.counts.total:,} parameters in {len(tensors)} tensors, {request.dtype}{form.note}"
    ]
    if request.verify and request.to == "hf":
        lines += _check_hf(directory, saved, request.dtype)
    elif request.verify:
        lines += _check_flax(directory, tensors)
    files.write_text(directory / "README.md", model_card(facts, request.to, lines))
    return Exported(facts, lines)


@dataclass(frozen=True)
class Form:
    """How weights are written: as what, with which JSON files, by which names. `note`: what a reader must know."""

    kind: str
    pages: dict[str, dict[str, Any]]
    pieces: list[Piece]
    note: str = ""


def _hf_form(saved: SavedRun, dtype: str) -> Form:
    model = saved.config.model
    family, end = family_of(model), saved.cache.eos_id
    ids = {
        "bos_token_id": end,
        "eos_token_id": end,
    }  # every document ends with it, so a text also begins after it
    pages = {
        "config.json": {**hf_config(model), **ids, "dtype": str(DTYPES[dtype]).removeprefix("torch.")},
        "generation_config.json": {**ids, "pad_token_id": end},
    }
    expressed = family.expressed(model)
    ours, theirs = (
        {split_name(spec.name)[1:] for spec in parameter_specs(one)} for one in (model, expressed)
    )
    zeros = ", ".join(sorted(f"{module}.{leaf}" for module, leaf in theirs - ours))
    note = f"; this class also has {zeros}, which this model lacks: they are zeros" if zeros else ""
    return Form(family.architecture, pages, hf_pieces(family, expressed), note)


def _flax_form(saved: SavedRun) -> Form:
    model = saved.config.model
    return Form("flat flax state", {"config.json": flax_config(model)}, flax_pieces(model))


def _check_hf(directory: Path, saved: SavedRun, dtype: str) -> list[str]:
    verdict: Verdict = verify(directory, saved, dtype)
    if verdict.problems:
        raise VerificationError(
            f"the export differs from what was trained and is not kept: {'; '.join(verdict.problems)}"
        )
    return verdict.lines()


def _check_flax(directory: Path, tensors: dict[str, Any]) -> list[str]:
    """Read back what was written: jax need not be installed."""
    found = read_tensors(directory)
    if found.keys() != tensors.keys() or any(
        found[name].dtype != value.dtype or not found[name].equal(value.cpu())
        for name, value in tensors.items()
    ):
        raise VerificationError(f"{directory / WEIGHTS} does not read back as it was written; check the disk")
    return [f"read back: {len(found)} arrays equal to the last bit"]


def write_tokenizer(directory: Path, cache: TokenCache, context_length: int) -> None:
    """Write the tokenizer so that AutoTokenizer gives the ids that training saw: the text's, and nothing else."""
    cache.verify_tokenizer()
    content = (cache.directory / TOKENIZER / "tokenizer.json").read_bytes()
    files.write_whole(directory / "tokenizer.json", lambda file: file.write(_without_additions(content)))
    end = cache.manifest["tokenizer"]["eos_token"]
    files.write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def _without_additions(content: bytes) -> bytes:
    """Return a tokenizer.json that neither adds tokens to a text nor cuts or pads it."""
    tokenizer = Tokenizer.from_buffer(content)
    adds = tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids
    if not adds and tokenizer.truncation is None and tokenizer.padding is None:
        return content
    values = json.loads(content) | {"truncation": None, "padding": None}
    if adds:
        values["post_processor"] = None
    return json.dumps(values, ensure_ascii=False, indent=2).encode()
