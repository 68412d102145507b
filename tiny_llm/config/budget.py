"""How long a run is: its updates, and the virtual epochs that they fall into.

P parameters, B targets an update. Budget and epoch are each given in targets a parameter or in updates. All
of it is exact rational arithmetic, so a boundary never depends on rounding of floats.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from tiny_llm.config.errors import ConfigError
from tiny_llm.config.rates import exact, round_half_up
from tiny_llm.config.schema import TrainingConfig

# The two measures of the budget, and of an epoch: one of each is set.
MEASURES = (("updates", "tokens_per_parameter"), ("epoch_updates", "epoch_tokens_per_parameter"))


def epoch_boundaries(training: TrainingConfig, parameters: int) -> tuple[int, ...]:
    """Return the cumulative updates after each epoch k: floor(k e P / B + 1/2), or k epoch_updates.

    Where budget or epoch is given in updates, the last epoch ends with the budget and may be shorter than the
    others; else the budget must be a whole number of epochs. Raising only the budget leaves all earlier
    boundaries as they were. Raises ConfigError for a partial or an empty epoch.
    """
    one_token = Fraction(parameters, training.batch_tokens)  # a parameter, in updates
    epoch = _in_updates(training.epoch_updates, training.epoch_tokens_per_parameter, one_token)
    budget = _in_updates(training.updates, training.tokens_per_parameter, one_token)
    epochs = budget / epoch
    if training.updates is None and training.epoch_updates is None and epochs.denominator != 1:
        raise _partial_epoch(training)
    boundaries = [round_half_up(k * epoch) for k in range(1, math.ceil(epochs) + 1)]
    if epochs.denominator != 1:
        boundaries[-1] = round_half_up(budget)
        if len(boundaries) > 1 and boundaries[-1] == boundaries[-2]:
            boundaries.pop()
    for number, (before, after) in enumerate(zip([0, *boundaries], boundaries, strict=False), 1):
        if before == after:
            raise _empty_epoch(training, number, epoch)
    return tuple(boundaries)


def drop_other_measure(values: dict[str, Any], chosen: frozenset[str]) -> None:
    """Set to null, in a composed mapping, what a budget or an epoch in updates stands in for.

    What the user chose beside it stays, for validation to refuse.
    """
    training = values.get("training")
    for updates, tokens in MEASURES:
        if (
            isinstance(training, dict)
            and training.get(updates) is not None
            and f"training.{tokens}" not in chosen
        ):
            training[tokens] = None


def _in_updates(updates: int | None, tokens_per_parameter: float | None, one_token: Fraction) -> Fraction:
    if updates is not None:
        return Fraction(updates)
    assert tokens_per_parameter is not None, "validation lets one of the two be null"
    return exact(tokens_per_parameter) * one_token


def _partial_epoch(training: TrainingConfig) -> ConfigError:
    assert training.tokens_per_parameter is not None
    assert training.epoch_tokens_per_parameter is not None
    epoch = exact(training.epoch_tokens_per_parameter)
    whole = int(exact(training.tokens_per_parameter) / epoch)
    nearest = " and ".join(f"{float(count * epoch):g}" for count in (whole, whole + 1) if count)
    return ConfigError(
        f"training.tokens_per_parameter={training.tokens_per_parameter:g} is not a whole number of epochs of "
        f"training.epoch_tokens_per_parameter={training.epoch_tokens_per_parameter:g}; "
        f"the nearest multiples are {nearest}"
    )


def _empty_epoch(training: TrainingConfig, number: int, epoch: Fraction) -> ConfigError:
    value = training.epoch_tokens_per_parameter
    key = "epoch_updates" if value is None else f"epoch_tokens_per_parameter={value:g}"
    return ConfigError(
        f"training.{key}: epoch {number} has no update, because an epoch is {float(epoch):.3g} updates of "
        f"training.batch_tokens={training.batch_tokens}; raise the first or lower the second"
    )
