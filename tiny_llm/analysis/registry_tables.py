"""The registry's tables: which models there are, and models side by side; for a terminal, as Markdown, as JSON.

In flow entries and comparisons; out flows text. A loss is in nats a token, and above the table stands how it was
measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console

from tiny_llm.analysis.keys import MISSING
from tiny_llm.analysis.report_console import rich_table
from tiny_llm.analysis.report_files import markdown_table
from tiny_llm.analysis.tables import TextTable
from tiny_llm.interop.comparison import Comparison, Measured

Form = Literal["table", "markdown", "json"]
LISTED = (
    "Losses are those that each run measured on its own held-out split while training: they compare only within one "
    "data identity and context. For all others: registry compare names=[...] data=..."
)


def list_text(facts: Sequence[Mapping[str, Any]], form: Form) -> str:
    """Return the table of a registry's models, from their entry.json."""
    if form == "json":
        return _json(list(facts))
    headers = (
        "name",
        "parameters",
        "core",
        "training tokens",
        "loss",
        "context",
        "data identity",
        "training tokens/s",
        "goal",
    )
    rows = [
        (
            one["name"],
            number(one["parameters"]),
            number(one["core_parameters"]),
            number(one["training_tokens"]),
            number(one["training_loss"], ".4f"),
            str(one["context_length"]),
            str(one["data_identity"])[:12],
            number(one["tokens_per_second"], ",.0f"),
            str(one["goal"]),
        )
        for one in facts
    ]
    numeric = (False, True, True, True, True, True, False, True, False)
    table = _text(TextTable(headers, tuple(rows), numeric), form)
    return f"{table}\n\n{LISTED}" if rows else "no models yet; add one with: registry add run=DIR name=NAME"


def comparison_text(comparison: Comparison, form: Form) -> str:
    """Return models side by side, then what each continues the prompts with."""
    if form == "json":
        return _json(comparison.plain())
    headers = (
        "model",
        "bits per byte",
        "loss per token",
        "targets",
        "parameters",
        "core",
        "training tokens",
        "training tokens/s",
        "trained on",
    )
    rows = tuple(_cells(one) for one in comparison.models)
    table = _text(TextTable(headers, rows, (False, *[True] * 7, False)), form)
    mark = "# Comparison\n\n" if form == "markdown" else ""
    head = [f"{mark}Losses in nats, {comparison.protocol}.", "", table, *_warnings(comparison)]
    return "\n".join([*head, *_continued(comparison, form)])


def _warnings(comparison: Comparison) -> list[str]:
    """Return a line for each model whose bits per byte are too low: its tokenizer drops some of the text."""
    return [
        f"\n{one.name}: its tokenizer does not give {one.altered_documents:,} of the documents back as they were; "
        "what it drops costs nothing here, so its bits per byte are too low."
        for one in comparison.models
        if one.altered_documents
    ]


def _cells(one: Measured) -> tuple[str, ...]:
    return (
        one.name,
        number(one.bits_per_byte, ".4f"),
        f"{one.loss:.4f}",
        f"{one.targets:,}",
        f"{one.parameters:,}",
        f"{one.core_parameters:,}",
        f"{one.training_tokens:,}",
        number(one.tokens_per_second, ",.0f"),
        one.device or MISSING,
    )


def _continued(comparison: Comparison, form: Form) -> list[str]:
    """Return each prompt with all models' greedy continuations below it, each on one line."""
    lines: list[str] = []
    for i, prompt in enumerate(comparison.prompts):
        headers = ("model", "greedy continuation")
        rows = tuple((one.name, visible(one.continuations[i])) for one in comparison.models)
        title = f"prompt: {visible(prompt)}"
        lines += ["", f"## {title}\n" if form == "markdown" else title]
        lines.append(_text(TextTable(headers, rows, (False, False)), form))
    return lines


def visible(text: str) -> str:
    """Return a text in quotes on one line, so that its spaces and line breaks are seen."""
    return json.dumps(text, ensure_ascii=False).replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def number(value: Any, form: str = ",") -> str:
    return MISSING if value is None else format(value, form)


def _text(table: TextTable, form: Form) -> str:
    if form == "markdown":
        return "\n".join(markdown_table(table))
    # Wider than any table: a narrow window wraps its lines, a pipe keeps them.
    console = Console(width=10_000, no_color=True)
    with console.capture() as captured:
        console.print(rich_table(table))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
