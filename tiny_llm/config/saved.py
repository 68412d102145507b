"""A config as a file, and the identity of the recipe in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from tiny_llm.config.errors import ConfigError
from tiny_llm.config.parse import parse_config
from tiny_llm.config.schema import Config

# What may differ when a run is resumed: where and how it runs, what it shows, which checkpoints it keeps.
FREE_ON_RESUME = (
    "runtime.device",
    "runtime.threads",
    "runtime.timeout_seconds",
    "output_dir",
    "resume",
    "dry_run",
    "data.prefetch",
    "tracking",
    "sample_prompt",
    "evaluation.prompts",
    "training.log_every",
    "training.checkpoint_policy",
    "training.checkpoint_epochs",
    "training.save_epoch_training_state",
    "training.recovery_minutes",
)
# What moreover changes no number but for rounding: two runs that differ in these alone are one experiment.
NOT_THE_RECIPE = (
    *FREE_ON_RESUME,
    "runtime.deterministic",
    "runtime.compile",
    "training.micro_batch_size",
    "decentralized.execution",
    "data.cache_dir",
    "data.prepare_workers",
    "data.batch_documents",
    "evaluation.batch_size",
)


def plain(config: Config) -> dict[str, Any]:
    """Return the config as nested dicts, lists and scalars."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert isinstance(values, dict)
    return values


def flatten(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested dicts as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        flat |= flatten(value, where) if isinstance(value, dict) else {where: value}
    return flat


def recipe_identity(config: Config) -> str:
    """Return the SHA-256 of everything in a config that decides a run's numbers.

    A key that the schema gives a default is younger than some saved runs; it counts where it differs from that
    default, so that their identities stay.
    """
    defaults = _defaults(config)
    recipe = {
        key: value
        for key, value in flatten(plain(config)).items()
        if key not in NOT_THE_RECIPE and (key not in defaults or value != defaults[key])
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _defaults(section: Any, path: str = "") -> dict[str, Any]:
    """Return the defaults that the schema gives to keys of this config."""
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(section):
        where = f"{path}.{entry.name}" if path else entry.name
        if dataclasses.is_dataclass(value := getattr(section, entry.name)):
            found |= _defaults(value, where)
        elif entry.default is not dataclasses.MISSING:
            found[where] = list(entry.default) if isinstance(entry.default, tuple) else entry.default
    return found


def to_yaml(config: Config) -> str:
    """Return the text of resolved.yaml, which `read_yaml` reads back to an equal config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def read_yaml(path: Path) -> Config:
    """Return the config of a resolved.yaml. Raises ConfigError naming a missing or damaged file."""
    from omegaconf import OmegaConf

    if not path.is_file():
        raise ConfigError(f"{path} does not exist; name a run directory, which holds a resolved.yaml")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path} is damaged: it holds no settings; restore a copy of it")
    try:
        return parse_config({str(key): value for key, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
