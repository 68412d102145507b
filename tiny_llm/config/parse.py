"""A composed mapping in, a frozen `Config` out; every wrong key, type or bound is one clear line.

Types are read off the annotations of schema.py. An integer may be written 1e4 when it is whole; NaN and
infinities are never numbers here. A union of sections is told apart by the `name` that each member allows.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from tiny_llm.config.errors import ConfigError, nearest
from tiny_llm.config.schema import Bound, Config

Section = TypeVar("Section")


def parse_config(values: Mapping[str, Any]) -> Config:
    """Return the typed config of a mapping without interpolations. Raises ConfigError."""
    return parse_section(Config, values)


def parse_section(section: type[Section], values: Any, path: str = "") -> Section:
    """Return the dataclass `section` read from `values`; `path` is where in the config it stands."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}={values!r}: expected a section with keys {', '.join(keys_of(section))}")
    allowed = keys_of(section)
    for key in values:
        if key not in allowed:
            raise unknown_key(_join(path, str(key)), [_join(path, name) for name in allowed])
    hints = typing.get_type_hints(section, include_extras=True)
    parsed = {}
    for entry in dataclasses.fields(section):  # type: ignore[arg-type]
        where = _join(path, entry.name)
        if entry.name in values:
            parsed[entry.name] = parse_value(hints[entry.name], values[entry.name], where)
        elif entry.default is dataclasses.MISSING:
            raise ConfigError(f"{where} is missing: {describe(hints[entry.name])}")
    return section(**parsed)


def parse_value(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as the annotation `hint` wants it; raise ConfigError naming `path` otherwise."""
    options = _options(hint)
    sections = [option for option in options if dataclasses.is_dataclass(option)]
    if sections:
        return parse_section(_member(sections, value, path), value, path)
    for option in options:
        accepted, result = _convert(option, value)
        if accepted:
            return result
    expected = describe(hint)
    if isinstance(value, float) and not math.isfinite(value):
        expected = expected.replace("a number", "a finite number")
    raise ConfigError(f"{path}={show(value)}: expected {expected}{_near_literal(options, value)}")


def keys_of(section: Any) -> list[str]:
    return [entry.name for entry in dataclasses.fields(section)]


def all_keys(section: Any = Config, path: str = "") -> list[str]:
    """Return every dotted key that some choice of sections allows."""
    keys = []
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        where = _join(path, name)
        members = [option for option in _options(hint) if dataclasses.is_dataclass(option)]
        keys += [where, *(key for member in members for key in all_keys(member, where))]
    return list(dict.fromkeys(keys))


def unknown_key(key: str, allowed: list[str]) -> ConfigError:
    near = nearest(key, allowed)
    shown = near or f"; allowed: {', '.join(allowed)}"
    return ConfigError(f"unknown key '{key}'{shown}")


def describe(hint: Any) -> str:
    """Say in words what an annotation allows."""
    return " or ".join(dict.fromkeys(_describe_option(option) for option in _options(hint)))


def _describe_option(option: Any) -> str:
    base, bound = _bound(option)
    if base is type(None):
        return "null"
    if get_origin(base) is Literal:
        return " | ".join(str(choice) for choice in get_args(base))
    if get_origin(base) is tuple:
        return f"a list, each {describe(get_args(base)[0])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(base, str(base))
    return f"{words} {bound}" if bound else words


def _options(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [option for member in get_args(hint) for option in _options(member)]
    return [hint]


def _bound(hint: Any) -> tuple[Any, Bound | None]:
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        return base, notes[0]
    return hint, None


def _convert(option: Any, value: Any) -> tuple[bool, Any]:
    base, bound = _bound(option)
    if base is type(None):
        return value is None, None
    if get_origin(base) is Literal:
        text = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        return text in get_args(base), text
    if get_origin(base) is tuple:
        return _convert_list(get_args(base)[0], value)
    if base is float or base is int:
        return _convert_number(base, bound, value)
    return isinstance(value, base), value


def _convert_number(base: type, bound: Bound | None, value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return False, None
    if base is int and value != int(value):
        return False, None
    number = base(value)
    return bound is None or bound.allows(number), number


def _convert_list(item: Any, value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, None
    converted = [_convert(item, entry) for entry in value]
    return all(accepted for accepted, _ in converted), tuple(result for _, result in converted)


def _member(sections: list[Any], value: Any, path: str) -> Any:
    """Return the member of a union of sections whose `name` allows the value's."""
    if len(sections) == 1:
        return sections[0]
    name = value.get("name") if isinstance(value, Mapping) else value
    names = {
        choice: section
        for section in sections
        for choice in get_args(typing.get_type_hints(section, include_extras=True)["name"])
    }
    if not isinstance(name, str) or name not in names:
        raise ConfigError(
            f"{path}.name={show(name)}: expected {' | '.join(names)}{nearest(str(name), names)}"
        )
    return names[name]


def _near_literal(options: list[Any], value: Any) -> str:
    choices = [
        str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)
    ]
    return nearest(str(value), choices)


def show(value: Any) -> str:
    """Return a value as a user writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
