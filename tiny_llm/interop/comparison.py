"""Models side by side, measured in one way that stands in the table.

With `data` every model is evaluated anew: the same held-out bytes, cut into blocks of the same number of tokens, in
fp32. Without it the losses are those that the runs measured, which compare only where the runs measured the same
split in the same blocks. One table never holds both: `one_protocol` refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiny_llm.config.parameters import parameter_counts
from tiny_llm.interop.entries import Entry
from tiny_llm.interop.held_out import HeldOut, default_prompts, evaluate_text, read_held_out
from tiny_llm.interop.opened import greedy_continuation, open_model
from tiny_llm.interop.pretrained import read_model
from tiny_llm.interop.tensors import ExchangeError


@dataclass(frozen=True)
class Measured:
    """One model's row. `protocol` says how the loss was measured; bits a byte are known where bytes are.

    altered_documents: those that its tokenizer does not give back as they were.
    """

    name: str
    protocol: str
    loss: float
    targets: int
    bits_per_byte: float | None
    parameters: int
    core_parameters: int
    training_tokens: int
    tokens_per_second: float | None
    device: str | None
    continuations: tuple[str, ...] = ()
    altered_documents: int = 0


@dataclass(frozen=True)
class Comparison:
    """Rows that were measured in the same way, best first."""

    protocol: str
    prompts: tuple[str, ...]
    models: tuple[Measured, ...]

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        models = [
            {k: v for k, v in dataclasses.asdict(one).items() if k != "protocol"} for one in self.models
        ]
        return {"protocol": self.protocol, "prompts": list(self.prompts), "models": models}


def compare(
    chosen: Sequence[Entry], data: str | None, most_bytes: int | None, prompts: Sequence[str], device: str
) -> Comparison:
    """Compare models on `data` (None: by what their runs measured). Raises ExchangeError."""
    if len({entry.name for entry in chosen}) < len(chosen):
        raise ExchangeError("names: a model stands there twice")
    if data is None:
        if prompts:
            raise ExchangeError(
                "prompts would be ignored without data=...; give the held-out text to measure on"
            )
        return one_protocol([recorded(entry) for entry in chosen], ())
    held_out = read_held_out(data, most_bytes)
    texts = tuple(prompts) or default_prompts(held_out)
    block = min(read_model(entry.model).context_length for entry in chosen)
    return one_protocol([evaluated(entry, held_out, block, texts, device) for entry in chosen], texts)


def one_protocol(rows: Sequence[Measured], prompts: Sequence[str]) -> Comparison:
    """Return rows as one comparison. Raises ExchangeError where they were not measured in the same way."""
    protocols = {row.protocol: row.name for row in rows}
    if len(protocols) > 1:
        ways = "; ".join(f"{name}: {protocol}" for protocol, name in protocols.items())
        raise ExchangeError(
            f"these losses do not compare, they were measured in different ways ({ways}); give data=... to measure "
            "every model anew on the same held-out text"
        )
    by = sorted(rows, key=lambda row: row.loss if row.bits_per_byte is None else row.bits_per_byte)
    return Comparison(next(iter(protocols)), tuple(prompts), tuple(by))


def recorded(entry: Entry) -> Measured:
    """Return what a model's run measured at its own checkpoint. Raises ExchangeError where it measured nothing."""
    facts = entry.facts
    alone = facts.worker is not None and facts.workers > 1
    if facts.training_loss is None or facts.training_loss_targets is None or alone:
        raise ExchangeError(
            f"{entry.name}: its run measured no loss of these weights; give data=... to measure it"
        )
    protocol = (
        f"measured by each run while training: {facts.training_loss_targets:,} held-out targets, "
        f"{facts.training_loss_over}, in blocks of {facts.context_length} tokens of the token cache "
        f"{facts.data_identity[:12]}, {facts.precision}"
    )
    return Measured(
        entry.name,
        protocol,
        facts.training_loss,
        facts.training_loss_targets,
        None,
        facts.parameters,
        facts.core_parameters,
        facts.training_tokens,
        facts.tokens_per_second,
        facts.device,
    )


def evaluated(entry: Entry, held_out: HeldOut, block: int, prompts: Sequence[str], device: str) -> Measured:
    """Evaluate a model on held-out text and let it continue prompts."""
    opened, facts = open_model(entry.model, device), entry.facts
    found = evaluate_text(opened, held_out, block)
    counts = parameter_counts(opened.model)
    protocol = (
        f"evaluated anew: {len(held_out.documents):,} documents, {held_out.bytes:,} bytes of {held_out.source} "
        f"(SHA-256 {held_out.sha256[:12]}), by each model's own tokenizer, an EOS before and after every document, "
        f"in consecutive blocks of {block} tokens that see nothing of each other, fp32"
    )
    return Measured(
        entry.name,
        protocol,
        found.loss,
        found.targets,
        found.bits_per_byte,
        counts.total,
        counts.core,
        facts.training_tokens,
        facts.tokens_per_second,
        facts.device,
        tuple(greedy_continuation(opened, prompt) for prompt in prompts),
        found.altered,
    )
