"""The registry: a directory a trained model, with everything that is needed to use it and to judge it.

    registry/NAME/model/       the export (see exporting.py), in fp32
    registry/NAME/RUN.md       goal, data, architecture, hyper-parameters, curve, results, samples
    registry/NAME/entry.json   the facts of it that a program wants
    registry/NAME/             what the run wrote: resolved.yaml, metrics.jsonl, environment.json, result.json, ...

An entry is whole or absent and never changes. The losses in it are those that the run measured while training; what
`comparison.py` measures is kept apart from them.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_llm import files
from tiny_llm.config.errors import nearest
from tiny_llm.config.parse import parse_section
from tiny_llm.data.cache import cache_directory
from tiny_llm.data.publication import locked, staged
from tiny_llm.interop import card
from tiny_llm.interop.exporting import Exported, Request, write_export
from tiny_llm.interop.held_out import default_prompts, read_held_out
from tiny_llm.interop.opened import greedy_continuation, open_model
from tiny_llm.interop.run_facts import RunFacts, Summary
from tiny_llm.interop.tensors import ExchangeError

ENTRY, MODEL = "entry.json", "model"
FROM_THE_RUN = (
    "resolved.yaml",
    "metrics.jsonl",
    "environment.json",
    "result.json",
    "samples.jsonl",
    "loss.png",
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Entry:
    """One model of the registry, as its entry.json tells."""

    directory: Path
    goal: str
    facts: Summary

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def model(self) -> Path:
        return self.directory / MODEL

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "goal": self.goal, **vars(self.facts)}


def add(registry: Path, name: str, request: Request, goal: str) -> tuple[Entry, Exported]:
    """Publish a run as registry/NAME. Raises ExchangeError for a name that is taken or cannot be one."""
    if not NAME.fullmatch(name):
        raise ExchangeError(f"name={name}: use letters, digits, '.', '_' and '-', such as v2-tinystories")
    directory = registry / name
    _refuse_existing(directory)
    with locked(directory, None), staged(directory) as staging:
        _refuse_existing(directory)
        (staging / MODEL).mkdir()
        exported = write_export(request, staging / MODEL)
        for file in FROM_THE_RUN:
            if (source := Path(request.run) / file).exists():
                shutil.copyfile(source, staging / file)
        samples = continuations_of(staging / MODEL, exported.facts, request.device)
        files.write_text(staging / "RUN.md", run_page(name, goal, exported, samples))
        files.write_json(staging / ENTRY, {"name": name, "goal": goal, **vars(exported.facts.summary())})
    return open_entry(registry, name), exported


def _refuse_existing(directory: Path) -> None:
    if directory.exists():
        raise ExchangeError(f"{directory} exists already; choose another name, or remove it first")


def open_entry(registry: Path, name: str) -> Entry:
    """Return registry/NAME. Raises ExchangeError when there is none."""
    path = registry / name / ENTRY
    if not NAME.fullmatch(name) or not path.is_file():
        known = [entry.name for entry in entries(registry)]
        hint = nearest(name, known) or f"; there are: {', '.join(known) or 'none yet'}"
        raise ExchangeError(f"{registry} has no model named {name}{hint}")
    return _read(path)


def entries(registry: Path) -> list[Entry]:
    """Return every model of a registry, by name."""
    pages = sorted(path for path in registry.glob(f"*/{ENTRY}") if NAME.fullmatch(path.parent.name))
    pages = [path for path in pages if not path.parent.name.endswith((".preparing", ".replaced"))]
    return [_read(path) for path in pages]


def _read(path: Path) -> Entry:
    values = files.read_mapping(path)
    goal = str(values.get("goal", ""))
    facts = {key: value for key, value in values.items() if key not in ("name", "goal")}
    return Entry(path.parent, goal, parse_section(Summary, facts, str(path)))


def continuations_of(model: Path, facts: RunFacts, device: str) -> list[tuple[str, str]]:
    """Return prompts from the run's own held-out text and the model's greedy continuations."""
    held_out = read_held_out(str(cache_directory(facts.config.data)), 2**16)
    opened = open_model(model, device)
    return [(prompt, greedy_continuation(opened, prompt)) for prompt in default_prompts(held_out)]


def run_page(name: str, goal: str, exported: Exported, samples: list[tuple[str, str]]) -> str:
    """Return RUN.md."""
    facts = exported.facts
    picture = ["", "![Loss against training targets](loss.png)"] if facts.rows else []
    lines = [
        f"# {name}",
        "",
        f"{card.title(facts)}, from {card.origin(facts)}. The weights are in `{MODEL}/`.",
        "",
        *card.section("Goal", [goal or "Not stated."]),
        *card.section("Data", card.table(card.data(facts))),
        *card.section("Architecture", card.table(card.architecture(facts))),
        *card.section("Hyper-parameters", card.table(card.recipe(facts))),
        *card.section("Curve", [*card.curve(facts), *picture]),
        *card.section("Results", card.results(facts)),
        *card.section("Export", [f"- {line}" for line in exported.lines]),
        *card.section("Samples", _samples(samples)),
    ]
    return "\n".join(lines)


def _samples(samples: list[tuple[str, str]]) -> list[str]:
    lines = ["Greedy continuations of the beginnings of held-out documents; the prompt ends at ⟶.", ""]
    for prompt, continuation in samples:
        text = f"{prompt}⟶{continuation}"
        fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
        lines += [fence, text, fence, ""]
    return lines[:-1]
