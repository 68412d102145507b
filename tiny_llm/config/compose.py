"""From a command line to one validated `Config`: Hydra composes conf/, `parse.py` types it.

`hydra_door` makes the function of a door (`python -m tiny_llm.train ...`) out of a task. Every user's mistake
leaves it as one line on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_llm.config.budget import drop_other_measure
from tiny_llm.config.errors import ConfigError, UserError, nearest, refusal
from tiny_llm.config.parse import all_keys, parse_config, unknown_key
from tiny_llm.config.placement import Placement, find_placement
from tiny_llm.config.schema import Config
from tiny_llm.config.validation import validate

Task = Callable[["Composed"], None]


class Composed:
    """One composed command line: the typed config and what the user asked for to get it."""

    def __init__(self, values: dict[str, Any], overrides: list[str]) -> None:
        self.values = values
        self.overrides = overrides
        self.chosen = frozenset(override_key(text) for text in overrides)
        drop_other_measure(values, self.chosen)

    def config(self) -> Config:
        """Return the validated config. Raises ConfigError."""
        config = parse_config(self.values)
        validate(config, self.chosen)
        return config


def conf_directory() -> Path:
    """Return the Hydra tree: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def config_groups() -> dict[str, list[str]]:
    """Return each config group with its options."""
    groups: dict[str, list[str]] = {}
    for path in sorted(conf_directory().rglob("*.yaml")):
        group = path.parent.relative_to(conf_directory()).as_posix()
        if group != ".":
            groups.setdefault(group, []).append(path.stem)
    return groups


def override_key(text: str) -> str:
    """Return the key or group that an override names: '++optimizer.lr=1' gives 'optimizer.lr'."""
    return text.partition("=")[0].lstrip("+~").partition("@")[0]


def compose(overrides: list[str]) -> Composed:
    """Compose conf/train.yaml with overrides, outside Hydra's own main. Raises ConfigError."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    check_overrides(overrides)
    with initialize_config_dir(str(conf_directory()), version_base="1.3"), one_line_errors():
        return Composed(_plain(hydra_compose("train", overrides)), overrides)


def check_overrides(overrides: list[str]) -> None:
    """Raise ConfigError for the first override whose key or option does not exist."""
    groups = config_groups()
    keys = [*all_keys(), *groups, "sweep_name"]
    for text in overrides:
        key = override_key(text)
        if key == "hydra" or key.startswith("hydra."):
            _check_launcher_key(key)
            continue
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"'{text}' is no override; write key=value, such as optimizer.lr=0.003")
        if key not in keys:
            if key in launcher_keys():
                raise ConfigError(f"unknown key '{key}'; did you mean 'hydra.launcher.{key}'?")
            raise (
                unknown_key(key, keys)
                if nearest(key, keys)
                else unknown_key(key, [*groups, "training", "evaluation"])
            )
        if key == "sweep_name" and ("/" in text or text.partition("=")[2].strip("'\"") in ("", ".", "..")):
            raise ConfigError(
                f"{text}: expected the name of one directory below outputs/sweeps, such as first-sweep"
            )
        if key in groups:
            _check_option(key, text.partition("=")[2], groups[key])


def launcher_keys() -> list[str]:
    """Return the settings of the launchers, which stand below hydra.launcher."""
    from omegaconf import OmegaConf

    pages = [OmegaConf.load(path) for path in sorted((conf_directory() / "hydra/launcher").glob("*.yaml"))]
    return [str(key) for page in pages for key in page if key != "_target_"]


def _check_launcher_key(key: str) -> None:
    section, _, name = key.removeprefix("hydra.").partition(".")
    if section == "launcher" and name.partition(".")[0] not in (known := launcher_keys()):
        raise unknown_key(key, [f"hydra.launcher.{word}" for word in dict.fromkeys(known)])


def _check_option(group: str, value: str, options: list[str]) -> None:
    if any(mark in value for mark in "([{$"):
        return  # a sweep or an interpolation: Hydra's to read
    for option in value.split(","):
        name = option.strip().strip("'\"")
        if name not in (*options, "null"):
            raise ConfigError(f"{group}={name}: expected {' | '.join(options)}{nearest(name, options)}")


class one_line_errors:
    """Turn what Hydra and OmegaConf raise while composing into a ConfigError of one line."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        if isinstance(error, HydraException | OmegaConfBaseException):
            raise ConfigError(_first_line(error)) from None


def _first_line(error: BaseException) -> str:
    from hydra.errors import OverrideParseException

    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, OverrideParseException):
        reason = text.partition(" See https")[0]
        return (
            f"'{error.override}' cannot be read: {reason}; close every bracket, put other text in '\"...\"'"
        )
    if unknown := re.search(r"Could not override '([^']+)'", text):
        section = unknown[1].partition(".")[0]
        return f"unknown key '{unknown[1]}' for the chosen {section}; see its keys with --cfg job"
    return re.sub(r"\s*full_key: (\S*).*", r" (at \1)", text)


def _plain(composed: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf, open_dict

    with one_line_errors():
        if "hydra" in composed:
            with open_dict(composed):
                del composed["hydra"]
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ("experiment", "sweep_name")}


def from_hydra(composed: Any, overrides: list[str]) -> Composed:
    """Return what Hydra composed from `overrides` without Hydra's own section. Raises ConfigError."""
    return Composed(_plain(composed), overrides)


def hydra_door(task: Task, sweeps: bool = False) -> Callable[[], None]:
    """Return the main function of a Hydra door that runs `task` on the composed command line.

    sweeps: whether the door takes -m, which hands all points to a launcher instead.
    """

    def main() -> None:
        with user_errors_in_one_line():
            import hydra
            from hydra._internal.utils import get_args_parser
            from hydra.core.hydra_config import HydraConfig

            arguments = get_args_parser().parse_args()
            check_overrides(arguments.overrides)
            _check_sweeping(arguments.overrides, arguments.multirun, sweeps)

            def run(composed: Any) -> None:
                overrides = list(HydraConfig.get().overrides.task)
                with user_errors_in_one_line():  # Hydra lets SystemExit pass, and reports the rest itself
                    task(from_hydra(composed, overrides))

            run.__module__ = task.__module__
            os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to the handler above, unprinted
            with one_line_errors():
                hydra.main(version_base="1.3", config_path=str(conf_directory()), config_name="train")(run)()

    return main


def _check_sweeping(overrides: list[str], multirun: bool, sweeps: bool) -> None:
    """Refuse a sweep where there is none to run, and a sweep's settings without one."""
    if (multirun or "hydra.mode=MULTIRUN" in overrides) and not sweeps:
        raise ConfigError("-m runs trainings side by side; use python -m tiny_llm.train -m")
    if multirun and find_placement().world > 1:
        raise ConfigError(
            "-m hands each point to a launcher, which starts its ranks itself: start one process, without torchrun "
            "or srun, and set hydra.launcher.nodes and hydra.launcher.tasks_per_node of hydra/launcher=slurm"
        )
    for text in overrides:
        if not multirun and override_key(text).startswith(("sweep_name", "hydra/launcher", "hydra.launcher")):
            raise ConfigError(f"{text} would be ignored without -m, which makes a sweep of the command")


class user_errors_in_one_line:
    """Print a UserError, and what the system refuses, as one line on stderr and exit with code 2.

    Ctrl-C, and a reader that went away (`| head`), end the door as they end other tools: with 128 and the signal.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        if isinstance(error, OSError) and (refused := refusal(error)):
            error = UserError(f"{refused[0].filename or 'a file'}: {refused[1]}")
        if isinstance(error, UserError):
            print(f"error: {_rank()}{' '.join(str(error).split())}", file=sys.stderr)
            raise SystemExit(2) from None


def _rank() -> str:
    """Return which of several ranks is speaking."""
    placement = Placement()
    with contextlib.suppress(UserError):
        placement = find_placement()
    return f"rank {placement.rank}: " if placement.world > 1 else ""
