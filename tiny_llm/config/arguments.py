"""`key=value` arguments of the doors that need no Hydra: a dataclass says which keys, types and bounds."""

from __future__ import annotations

import dataclasses
import sys
import typing
from typing import TypeVar, get_args, get_origin

from tiny_llm.config.errors import ConfigError
from tiny_llm.config.parse import describe, keys_of, parse_section, unknown_key

Arguments = TypeVar("Arguments")


def parse_arguments(door: str, arguments: type[Arguments], argv: list[str] | None = None) -> Arguments:
    """Return the dataclass `arguments` read from key=value words; --help prints its keys and exits."""
    words = sys.argv[1:] if argv is None else argv
    hints = typing.get_type_hints(arguments, include_extras=True)
    if any(word in ("-h", "--help") for word in words):
        print(_usage(door, arguments, hints))
        raise SystemExit(0)
    values: dict[str, object] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(
                f"'{word}' is no argument; write key=value with keys {', '.join(keys_of(arguments))}"
            )
        if key not in hints:
            raise unknown_key(key, keys_of(arguments))
        values[key] = text if hints[key] is str else _value(text, hints[key])
    for entry in dataclasses.fields(arguments):  # type: ignore[arg-type]
        if entry.default is dataclasses.MISSING and entry.name not in values:
            what = describe(hints[entry.name])
            raise ConfigError(
                f"{entry.name} is missing: add {entry.name}=... ({what}); all keys: python -m tiny_llm.{door} --help"
            )
    return parse_section(arguments, values)


def _value(text: str, hint: object) -> object:
    """Return a word as null, a truth value or a number where it reads as one and the key could take it."""
    if any(get_origin(option) is tuple for option in (hint, *get_args(hint))):
        return _list(text, hint)
    if text == "null":
        return None
    if str in get_args(hint):
        return text
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _list(text: str, hint: object) -> object:
    """Return the items of a list such as [a,b], ['a, b',c] or [1,2]; anything else as it is."""
    import yaml

    try:
        items = yaml.load(text, yaml.BaseLoader) if text.startswith("[") else None
    except yaml.YAMLError:
        items = None
    if items is None:
        return text
    item_hint = next(get_args(option)[0] for option in (hint, *get_args(hint)) if get_origin(option) is tuple)
    return items if item_hint is str else [_value(item, item_hint) for item in items]


def _usage(door: str, arguments: type[object], hints: dict[str, object]) -> str:
    lines = [f"usage: python -m tiny_llm.{door} KEY=VALUE ...", ""]
    for entry in dataclasses.fields(arguments):  # type: ignore[arg-type]
        default = entry.default
        shown = (
            "required"
            if default is dataclasses.MISSING
            else f"default {'null' if default is None else default}"
        )
        lines.append(f"  {entry.name:<16} {describe(hints[entry.name])}; {shown}")
    return "\n".join(lines)
