"""The commands that error messages of this room tell the user to type.

They repeat what the user typed where this process is a door that composes a whole config, so that model,
budget and corpus stay those of the run; elsewhere they name the data settings that differ from conf/data.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tiny_llm.config.compose import conf_directory, override_key
from tiny_llm.config.schema import DataConfig

PLAIN = re.compile(
    r"(?!(null|true|false|nan|inf)$)[A-Za-z/.][\w/.:-]*", re.IGNORECASE | re.ASCII
)  # no quotes needed
COMPOSING_DOORS = ("tiny_llm.train", "tiny_llm.prepare")


def prepare_command(data: DataConfig, **changes: Any) -> str:
    """Return the command that prepares the cache of this run with some data settings changed."""
    return door_command("prepare", data, **changes)


def door_command(door: str, data: DataConfig, **changes: Any) -> str:
    """Return the command that opens a door with this run's settings, some data settings changed."""
    overrides = _typed_overrides()
    if overrides is None:
        overrides = [f"data={data.name}", *_differing(data)]
    kept = [text for text in overrides if override_key(text).removeprefix("data.") not in changes]
    changed = [f"data.{key}={_value(value)}" for key, value in changes.items()]
    return f"python -m tiny_llm.{door} {shlex.join([*kept, *changed])}".rstrip()


def remove_command(directory: Path) -> str:
    """Return the command that removes a cache directory."""
    return shlex.join(["rm", "-r", str(directory)])


def _typed_overrides() -> list[str] | None:
    """Return the overrides that the user typed, or None when they do not compose this run's config."""
    specification = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(specification, "name", None) not in COMPOSING_DOORS:
        return None
    overrides = [text for text in sys.argv[1:] if not text.startswith("-")]
    return None if any(override_key(text) == "resume" for text in overrides) else overrides


def _differing(data: DataConfig) -> list[str]:
    """Return overrides for the settings that differ from the corpus's page in conf/data."""
    path = conf_directory() / "data" / f"{data.name}.yaml"
    shipped = OmegaConf.to_container(OmegaConf.load(path), resolve=True) if path.is_file() else {}
    assert isinstance(shipped, dict)
    differing = []
    for setting in dataclasses.fields(data):
        value = getattr(data, setting.name)
        plain = list(value) if isinstance(value, tuple) else value
        if setting.name not in shipped or shipped[setting.name] != plain:
            differing.append(f"data.{setting.name}={_value(plain)}")
    return differing


def _value(value: Any) -> str:
    """Return a value in Hydra's override grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value(item) for item in value) + "]"
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return "'" + value.replace("'", "\\'") + "'"
    return str(value)
