"""What must hold between several keys, checked before any work."""

from __future__ import annotations

import os

from tiny_llm.config.errors import ConfigError
from tiny_llm.config.schema import Config


def validate(config: Config, chosen: frozenset[str] = frozenset()) -> None:
    """Raise ConfigError at the first combination that cannot work or would be ignored.

    chosen: the keys and groups that the user set for this run, to tell a default from a choice.
    """
    _validate_model(config)
    _validate_checkpoints(config)
    _validate_decentralized(config, chosen)
    device = config.runtime.device
    if device not in ("auto", "cpu", "cuda") and not (device.startswith("cuda:") and device[5:].isdigit()):
        raise ConfigError(f"runtime.device={device}: expected auto, cpu, cuda or cuda:N")
    if not config.output_dir:
        raise ConfigError(
            "output_dir is empty: name a directory, or leave the key out for outputs/<date>/<time>"
        )


def _validate_model(config: Config) -> None:
    model = config.model
    if model.width % model.heads or model.head_dim % 2:
        fitting = [h for h in range(1, model.width + 1) if model.width % h == 0 and model.width // h % 2 == 0]
        raise ConfigError(
            f"model.heads={model.heads}: expected a divisor of model.width={model.width} that leaves an even head "
            f"dimension; the nearest is {min(fitting, key=lambda h: abs(h - model.heads), default='none')}"
        )
    if model.vocab_size < config.data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: the corpus has token ids up to {config.data.vocab_size - 1}; "
            "leave the key out or raise it"
        )


def _validate_checkpoints(config: Config) -> None:
    training = config.training
    policy, epochs = training.checkpoint_policy, training.checkpoint_epochs
    if policy == "explicit" and isinstance(epochs, int):
        raise ConfigError(
            f"training.checkpoint_epochs={epochs}: checkpoint_policy=explicit wants a list, such as [1,5]"
        )
    if policy == "interval" and not isinstance(epochs, int):
        raise ConfigError(
            f"training.checkpoint_epochs={list(epochs)}: checkpoint_policy=interval wants one integer"
        )


def _validate_decentralized(config: Config, chosen: frozenset[str]) -> None:
    decentralized, adaptive = config.decentralized, config.adaptive_consensus
    if decentralized.scheme == "off":
        for key in sorted(chosen):
            if (
                key.partition(".")[0] in ("topology", "adaptive_consensus", "decentralized")
                and key != "decentralized"
            ):
                raise ConfigError(
                    f"{key} would be ignored with decentralized=off; add decentralized=awc or =atc"
                )
        if decentralized.num_models != 1:
            raise ConfigError(
                f"decentralized.num_models={decentralized.num_models}: decentralized=off has one model; "
                "add decentralized=awc or =atc"
            )
    if adaptive.enabled and (adaptive.start_frac is None or adaptive.p is None):
        missing = "start_frac" if adaptive.start_frac is None else "p"
        raise ConfigError(f"adaptive_consensus.{missing}=null: required when adaptive_consensus=on")
    if not adaptive.enabled and (adaptive.start_frac is not None or adaptive.p is not None):
        raise ConfigError("adaptive_consensus.start_frac and .p would be ignored; add adaptive_consensus=on")


def check_writable(directory: str) -> None:
    """Raise ConfigError when no run can be made in `directory`."""
    parent = os.path.abspath(directory)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise ConfigError(f"output_dir={directory}: cannot write below {parent}; choose another output_dir")
