"""What `resume=` means: which state, with which config, and what may differ from the first start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiny_llm.config.compose import Composed
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.memory import divisors
from tiny_llm.config.parse import parse_config, show
from tiny_llm.config.saved import FREE_ON_RESUME, flatten, plain, read_yaml
from tiny_llm.config.schema import Config
from tiny_llm.config.validation import validate

# What `auto` or null became at the first start stays; asking for auto again is no difference.
SETTLED = ("training.micro_batch_size", "runtime.precision", "runtime.compile")


@dataclass(frozen=True)
class Resume:
    """A run to go on with: its directory, the file that was named (None: the newest state), the config."""

    directory: Path
    file: Path | None
    config: Config


def resumed(composed: Composed, ranks: int = 1) -> Resume:
    """Return the saved config of `resume=` with the overrides that may differ. Raises ConfigError.

    ranks: on which the run goes on, whatever it ran on before.
    """
    named = Path(str(composed.values["resume"]))
    if not named.exists():
        raise ConfigError(f"resume={named} does not exist; name a run directory or one of its .pt files")
    directory, file = (named, None) if named.is_dir() else (named.parent, named)
    if directory.name.startswith("node-"):
        root = directory.parent / named.name if file else directory.parent
        raise ConfigError(
            f"resume={named} is one worker's part and cannot resume a run by itself; use resume={root}"
        )
    saved = read_yaml(directory / "resolved.yaml")
    values = plain(saved)
    for key, value in _asked(composed).items():
        _apply(values, key, value)
    if "output_dir" not in composed.chosen:
        _set(values, "output_dir", str(directory))
    _set(values, "resume", str(named))
    config = parse_config(values)
    validate(config)
    return Resume(directory, file, _fitted(config, ranks))


def continuation(directory: Path, config: Config, ranks: int = 1) -> Resume | None:
    """Return what an attempt that ended early left in `directory` to go on from; None starts from scratch."""
    from tiny_llm.training.checkpoint import STATE_FILES

    if not any(state for pattern in STATE_FILES for state in directory.glob(pattern)):
        return None
    values = plain(config) | {"resume": str(directory)}
    return resumed(Composed(values, [f"{key}=" for key in FREE_ON_RESUME]), ranks)


def _fitted(config: Config, ranks: int) -> Config:
    """Return the config with the largest micro-batch up to the saved one that divides a rank's sequences."""
    training, saved = config.training, config.training.micro_batch_size
    sequences, rest = divmod(training.batch_tokens, config.model.context_length * ranks)
    if config.decentralized.num_models > 1 or saved is None or rest:
        return config
    fitting = max(size for size in divisors(sequences) if size <= saved)
    return replace(config, training=replace(training, micro_batch_size=fitting))


def _asked(composed: Composed) -> dict[str, Any]:
    """Return every key that the overrides of this command line decide, with its value."""
    asked = flatten(composed.values)
    if "experiment" in composed.chosen:
        return {key: value for key, value in asked.items() if key != "output_dir"}
    return {
        key: value
        for key, value in asked.items()
        if any(key == chosen or key.startswith(f"{chosen}.") for chosen in composed.chosen)
    }


def _apply(values: dict[str, Any], key: str, value: Any) -> None:
    saved = flatten(values).get(key)
    if key in FREE_ON_RESUME:
        _set(values, key, value)
    elif saved != value and not (key in SETTLED and value in ("auto", None)):
        raise ConfigError(
            f"{key}={show(value)} differs from {show(saved)} of the run that resume= names; leave it out, or start "
            f"a new run. May differ: {', '.join(FREE_ON_RESUME)}"
        )


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        values = values[part]
    values[last] = value
