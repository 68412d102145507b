"""What must hold between several keys, checked before any work."""

from __future__ import annotations

import os

from tiny_llm.config.budget import MEASURES
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.schema import Config, HubCorpus, ModelConfig


def validate(config: Config, chosen: frozenset[str] = frozenset()) -> None:
    """Raise ConfigError at the first combination that cannot work or would be ignored.

    chosen: the keys and groups that the user set for this run, to tell a default from a choice.
    """
    _validate_model(config, chosen)
    _validate_budget(config)
    _validate_held_out(config, chosen)
    _validate_checkpoints(config)
    _validate_decentralized(config, chosen)
    device = config.runtime.device
    if device not in ("auto", "cpu", "cuda") and not (device.startswith("cuda:") and device[5:].isdigit()):
        raise ConfigError(f"runtime.device={device}: expected auto, cpu, cuda or cuda:N")
    if not config.output_dir:
        raise ConfigError(
            "output_dir is empty: name a directory, or leave the key out for outputs/<date>/<time>"
        )


def _validate_model(config: Config, chosen: frozenset[str]) -> None:
    model = config.model
    _validate_heads(model)
    if model.positions == "learned" and "model.rope_theta" in chosen:
        raise ConfigError(
            "model.rope_theta would be ignored with model.positions=learned; add model.positions=rope"
        )
    if model.vocab_size < config.data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: the corpus has token ids up to {config.data.vocab_size - 1}; "
            "leave the key out or raise it"
        )


def _validate_heads(model: ModelConfig) -> None:
    pairs = 2 if model.positions == "rope" else 1  # a rotation turns pairs of elements
    if model.head_dim is None and (model.width % model.heads or model.head_width % pairs):
        fitting = [h for h in _divisors(model.width) if model.width // h % pairs == 0]
        even = " that leaves an even head dimension" if pairs == 2 else ""
        raise ConfigError(
            f"model.heads={model.heads}: expected a divisor of model.width={model.width}{even}; "
            f"the nearest is {min(fitting, key=lambda h: abs(h - model.heads), default='none')}; "
            "or set model.head_dim"
        )
    if model.head_width % pairs:
        raise ConfigError(
            f"model.head_dim={model.head_dim}: expected an even number, because model.positions=rope turns pairs; "
            f"the nearest is {model.head_width + 1}"
        )
    if model.heads % model.groups:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads}: expected a divisor of model.heads={model.heads}: "
            f"{', '.join(map(str, _divisors(model.heads)))}"
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _validate_budget(config: Config) -> None:
    for updates, tokens in MEASURES:
        count, share = getattr(config.training, updates), getattr(config.training, tokens)
        if count is None and share is None:
            raise ConfigError(f"training.{tokens}=null: set it, or training.{updates}")
        if count is not None and share is not None:
            raise ConfigError(
                f"training.{updates}={count} and training.{tokens}={share:g} exclude each other; leave one out "
                "or set it to null"
            )


def _validate_held_out(config: Config, chosen: frozenset[str]) -> None:
    data = config.data
    if not isinstance(data, HubCorpus) and data.validation_tokens and "data.held_out_share" in chosen:
        raise ConfigError(
            f"data.held_out_share would be ignored with data.validation_tokens={data.validation_tokens}; "
            "leave one out"
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


def check_writable(directory: str, key: str = "output_dir") -> None:
    """Raise ConfigError when nothing can be made in `directory`, which `key` names."""
    parent = os.path.abspath(directory)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise ConfigError(f"{key}={directory}: cannot write below {parent}; choose another {key}")
