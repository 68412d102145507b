"""Config keys in a report: which tell configurations apart, which merely follow others, how they are written.

A configuration is a mapping of dotted keys to plain values; mappings may have different keys, as a cosine and a
wsd schedule have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]

MISSING = "-"
"""What is shown where a configuration has no such key."""

CHOICES = ("scheme", "name", "enabled")
"""Last parts of the keys that choose among sections; they come first."""

SHARED_LAST_PARTS = ("seed", "vocab_size")
"""Last parts that several sections have, so that they say too little alone."""


def value_of(settings: Settings, key: str) -> str:
    """Return a setting as one would write it on the command line; MISSING where there is none."""
    if key not in settings:
        return MISSING
    value = settings[key]
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def identity(settings: Settings, keys: Iterable[str] | None = None) -> str:
    """Return a text that settings share exactly if they are equal (in `keys`)."""
    return json.dumps({key: value_of(settings, key) for key in sorted(settings if keys is None else keys)})


def varying_keys(configurations: Sequence[Settings]) -> tuple[str, ...]:
    """Return the keys that tell the configurations apart: choices first, keys that follow from others last.

    A key that only some have, all with one value, counts only where configurations would look equal without it.
    """
    everywhere = list(dict.fromkeys(key for one in configurations for key in one))
    found = {key: {value_of(one, key) for one in configurations} for key in everywhere}
    keys = [key for key in everywhere if len(found[key] - {MISSING}) > 1]
    different = {identity(one) for one in configurations}
    if len({identity(one, keys) for one in configurations}) < len(different):
        keys = [key for key in everywhere if len(found[key]) > 1]
    keys.sort(key=lambda key: key.rpartition(".")[2] not in CHOICES)
    swept = swept_keys(configurations, keys)
    return (*swept, *(key for key in keys if key not in swept))


def followers(configurations: Sequence[Settings], keys: Sequence[str], key: str) -> list[str]:
    """Return the keys whose value follows from that of `key`: each value of `key` always meets the same one.

    Nothing follows from a key that some have not: the choice that brings it comes first.
    """
    if any(key not in one for one in configurations):
        return []
    values = len({value_of(one, key) for one in configurations})
    return [
        other
        for other in keys
        if other != key and len({identity(one, (key, other)) for one in configurations}) == values
    ]


def swept_keys(configurations: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """Return the keys that follow from no other: of a scheme with its own tuned lr, the scheme.

    Of several that follow from each other, the first stands for all.
    """
    following = {key: followers(configurations, keys, key) for key in keys}
    swept: list[str] = []
    for key in keys:
        leaders = [other for other in keys if key in following[other]]
        mutual = [other for other in leaders if other in following[key]]
        if leaders == mutual and not set(mutual) & set(swept):
            swept.append(key)
    return swept


def short_name(key: str) -> str:
    """Return the shortest name that a reader understands: lr for optimizer.lr, topology for topology.name."""
    section, _, last = key.rpartition(".")
    if last in ("name", "enabled"):
        return section
    return key if last in SHARED_LAST_PARTS else last


def names_of(key: str) -> set[str]:
    """Return all that a user may call a key: decentralized.scheme also scheme, and decentralized as in a run."""
    section, _, last = key.rpartition(".")
    return {key, last, short_name(key), *([section] if last in CHOICES else [])}


def label_of(settings: Settings, keys: Iterable[str]) -> str:
    """Return a configuration in words: `awc, ring, lr 0.008`; keys that it has not are left out."""
    words = []
    for key in keys:
        if key in settings:
            named = key.endswith((".scheme", ".name"))
            words.append(value_of(settings, key) if named else f"{short_name(key)} {value_of(settings, key)}")
    return ", ".join(words)
