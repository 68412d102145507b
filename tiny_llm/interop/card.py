"""What a person reads about trained weights: the model card of an export, and the registry's RUN.md.

In flow `RunFacts`; out flows Markdown. Every number stands beside what it is a number of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiny_llm.config.parse import show
from tiny_llm.config.saved import flatten, plain
from tiny_llm.interop.run_facts import RunFacts

Pairs = Sequence[tuple[str, Any]]
MOST_CURVE_ROWS = 20


def model_card(facts: RunFacts, to: str, exported: Sequence[str]) -> str:
    """Return README.md of an export; `exported`: what was written, then what was verified."""
    hf = to == "hf"
    lines = [
        "---",
        *(["library_name: transformers", "pipeline_tag: text-generation"] if hf else ["library_name: flax"]),
        "tags: [tiny_llm]",
        "---",
        "",
        f"# {title(facts)}",
        "",
        f"{exported[0]}. Exported from {origin(facts)}.",
        "",
        *(_hf_usage() if hf else _flax_usage()),
        *section("Architecture", table(architecture(facts))),
        *section("Recipe", table(recipe(facts))),
        *section("Data", table(data(facts))),
        *section("Results", results(facts)),
        *section(
            "Verification", [f"- {line}" for line in exported[1:]] or ["Not verified (`verify=false`)."]
        ),
    ]
    return "\n".join(lines)


def title(facts: RunFacts) -> str:
    total = facts.counts.total
    size = f"{total / 1e6:.1f}M" if total >= 1e6 else f"{total:,}"
    return f"{size} parameters trained on {facts.config.data.name}"


def origin(facts: RunFacts) -> str:
    """Say which weights these are."""
    workers = facts.plan.num_models
    whose = f"worker {facts.worker} of {workers}, " if facts.worker is not None and workers > 1 else ""
    if not whose and workers > 1:
        whose = f"the mean of {workers} workers, "
    return f"`{facts.checkpoint}`: {whose}after {facts.update:,} of {facts.plan.updates:,} updates"


def section(name: str, lines: Sequence[str]) -> list[str]:
    return [f"## {name}", "", *lines, ""]


def table(pairs: Pairs) -> list[str]:
    """Return a Markdown table of two columns."""
    return ["| | |", "|:--|:--|", *(f"| {key} | {cell(value)} |" for key, value in pairs)]


def cell(value: Any) -> str:
    """Return a value as the text of a table's cell."""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else show(value)
    return " ".join(text.split()).replace("|", "\\|")


def architecture(facts: RunFacts) -> Pairs:
    counts = facts.counts
    numbers = [
        ("parameters", counts.total),
        ("of these embedding, head, core", f"{counts.embedding:,}, {counts.head:,}, {counts.core:,}"),
    ]
    return [*numbers, *vars(facts.config.model).items()]


def recipe(facts: RunFacts) -> Pairs:
    """Return the settings that decide training, and what they come to."""
    plan, values = facts.plan, plain(facts.config)
    sections = ["optimizer", "schedule"]
    if facts.config.decentralized.scheme != "off":
        sections += ["decentralized", "topology", "adaptive_consensus"]
    settings = [(f"{name}.{key}", value) for name in sections for key, value in flatten(values[name]).items()]
    return [
        ("updates", plan.updates),
        ("training targets", plan.tokens),
        ("targets an update", facts.config.training.batch_tokens),
        ("workers", plan.num_models),
        *settings,
        (
            "started from",
            facts.config.init_from or f"initial weights of runtime.seed={facts.config.runtime.seed}",
        ),
        ("precision", facts.config.runtime.precision),
        ("device", facts.environment.get("hardware", {}).get("device_name", "unknown")),
    ]


def data(facts: RunFacts) -> Pairs:
    corpus, settings = facts.corpus, facts.config.data
    named = [
        (key, value)
        for key in ("dataset", "subset", "revision", "train_split", "validation_split", "held_out_share")
        if (value := getattr(settings, key, None)) is not None
    ]
    if resolved := _revision(corpus):
        named = [(key, resolved if key == "revision" else value) for key, value in named]
    tokenizer = corpus["tokenizer"]
    return [
        ("corpus", settings.name),
        *named,
        (
            "tokenizer",
            f"{tokenizer['source']}, {tokenizer['entries']:,} entries, ends documents with {tokenizer['eos_token']}",
        ),
        ("training tokens in the cache", corpus["splits"]["train"]["tokens"]),
        ("held-out tokens", corpus["splits"]["validation"]["tokens"]),
        ("identity of the token cache", corpus["identity"]),
    ]


def _revision(corpus: Mapping[str, Any]) -> str | None:
    found = corpus.get("corpus")
    return found.get("revision") if isinstance(found, Mapping) else None


def results(facts: RunFacts) -> list[str]:
    """Return what the run measured of these weights, with what it is a measure of."""
    loss, workers = facts.loss(), facts.plan.num_models
    lines = []
    if loss is None:
        lines.append(f"The run measured no validation loss at update {facts.update:,}.")
    else:
        of = "" if workers == 1 else f" of the mean of the {workers} workers"
        lines.append(
            f"Validation loss{of}: **{loss.nats:.4f}** nats a token, the token-weighted mean cross-entropy over "
            f"{loss.targets:,} held-out targets, {loss.over}, in blocks of {facts.config.model.context_length} "
            f"tokens, in {facts.config.runtime.precision}, measured by the run itself."
        )
    if facts.worker is not None and workers > 1:
        lines.append(f"Worker {facts.worker}'s own loss was not measured by the run.")
    if not facts.finished:
        lines.append("These are not the weights of a finished run.")
    if "tokens_per_second" in facts.result:
        lines.append(f"Training went at {facts.result['tokens_per_second']:,.0f} targets a second.")
    return lines


def curve(facts: RunFacts) -> list[str]:
    """Return the validation losses up to these weights, a few dozen rows at most."""
    rows = [row for row in facts.rows if row["event"] == "validation" and row["update"] <= facts.update]
    step = -(-len(rows) // MOST_CURVE_ROWS) or 1
    kept = [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % step == 0]
    return [
        "| epoch | update | training targets | validation loss (nats, subset) |",
        "|--:|--:|--:|--:|",
        *(f"| {row['epoch']} | {row['update']:,} | {row['tokens']:,} | {row['loss']:.4f} |" for row in kept),
    ]


def _hf_usage() -> list[str]:
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))",
        "```",
        "",
    ]


def _flax_usage() -> list[str]:
    return [
        "```python",
        "from flax import nnx",
        "from safetensors.flax import load_file",
        "",
        'arrays = load_file("THIS_DIRECTORY/model.safetensors")',
        "state = nnx.state(model, nnx.Param)  # of a model whose modules have the names below",
        "for path, variable in nnx.to_flat_state(state):",
        '    variable.set_value(arrays[".".join(map(str, path))])',
        "nnx.update(model, state)",
        "```",
        "",
        "`kernel` is [in, out], `embedding` [entries, width]; q, k, v are one kernel, and so are gate, up.",
        "",
    ]
