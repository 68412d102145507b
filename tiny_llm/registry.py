"""A registry of trained models: `python -m tiny_llm.registry add|list|compare|show KEY=VALUE ...`.

  add      run=DIR name=NAME [goal="..."]      keep a run's weights with all that is known of it
  list                                         every model
  compare  names=[A,B] data=DIR-OR-GLOB        measure models anew on the same held-out bytes, side by side
  show     name=NAME                           a model's RUN.md

Each command prints its keys with --help.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import ConfigError, nearest
from tiny_llm.config.schema import Count, PositiveInt

Form = Literal["table", "markdown", "json"]


@dataclass(frozen=True)
class AddArguments:
    run: str
    name: str
    goal: str = ""
    checkpoint: str | None = None
    worker: Count | None = None
    to: Literal["hf", "flax"] = "hf"
    verify: bool = True
    registry: str = "registry"
    device: str = "auto"


@dataclass(frozen=True)
class ListArguments:
    registry: str = "registry"
    format: Form = "table"


@dataclass(frozen=True)
class CompareArguments:
    names: tuple[str, ...]
    data: str | None = None
    most_bytes: PositiveInt | None = 1_000_000
    prompts: tuple[str, ...] = ()
    registry: str = "registry"
    device: str = "auto"
    format: Form = "table"


@dataclass(frozen=True)
class ShowArguments:
    name: str
    registry: str = "registry"
    format: Form = "table"


def add(words: list[str]) -> None:
    arguments = parse_arguments("registry add", AddArguments, words)
    from tiny_llm.interop.entries import add
    from tiny_llm.interop.exporting import Request

    request = Request(
        arguments.run,
        arguments.checkpoint,
        arguments.worker,
        arguments.to,
        "fp32",
        arguments.verify,
        arguments.device,
    )
    entry, exported = add(Path(arguments.registry), arguments.name, request, arguments.goal)
    for line in exported.lines:
        print(line)
    print(f"added: {entry.directory}")


def list_all(words: list[str]) -> None:
    arguments = parse_arguments("registry list", ListArguments, words)
    from tiny_llm.analysis.registry_tables import list_text
    from tiny_llm.interop.entries import entries

    print(list_text([entry.plain() for entry in entries(Path(arguments.registry))], arguments.format))


def compare(words: list[str]) -> None:
    arguments = parse_arguments("registry compare", CompareArguments, words)
    if not arguments.names:
        raise ConfigError("names=[]: name at least one model, such as names=[a,b]")
    from tiny_llm.analysis.registry_tables import comparison_text
    from tiny_llm.interop.comparison import compare
    from tiny_llm.interop.entries import open_entry

    chosen = [open_entry(Path(arguments.registry), name) for name in arguments.names]
    found = compare(chosen, arguments.data, arguments.most_bytes, arguments.prompts, arguments.device)
    print(comparison_text(found, arguments.format))


def show(words: list[str]) -> None:
    arguments = parse_arguments("registry show", ShowArguments, words)
    from tiny_llm.interop.entries import ENTRY, open_entry

    directory = open_entry(Path(arguments.registry), arguments.name).directory
    text = (directory / (ENTRY if arguments.format == "json" else "RUN.md")).read_text()
    if arguments.format == "table" and sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "add": add,
    "list": list_all,
    "compare": compare,
    "show": show,
}


def main() -> None:
    with user_errors_in_one_line():
        command, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
        if command in ("-h", "--help"):
            print(__doc__)
            return
        if command not in COMMANDS:
            raise ConfigError(f"'{command}': expected {' | '.join(COMMANDS)}{nearest(command, COMMANDS)}")
        COMMANDS[command](words)


if __name__ == "__main__":
    main()
