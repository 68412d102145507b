"""Run directories as the trainer leaves them, made in milliseconds: its config writer, its rows, its endings."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_llm.config.compose import compose
from tiny_llm.config.saved import recipe_identity, to_yaml
from tiny_llm.config.schema import Config

EPOCHS, UPDATES_AN_EPOCH, BATCH_TOKENS = 8, 50, 8192
UPDATES = EPOCHS * UPDATES_AN_EPOCH
PARAMETERS = 1_127_296


def config_of(*overrides: str) -> Config:
    """Compose a config; seeds are put in afterwards, since composing takes long."""
    seeds = [text for text in overrides if text.startswith("runtime.seed=")]
    config = _composed(*(text for text in overrides if text not in seeds))
    for text in seeds:
        config = replace(config, runtime=replace(config.runtime, seed=int(text.partition("=")[2])))
    return config


@functools.cache
def _composed(*overrides: str) -> Config:
    return compose(["model=tiny", "data=stdlib", *overrides]).config()


_yaml = functools.cache(to_yaml)
_recipe = functools.cache(recipe_identity)


def make_run(
    directory: Path,
    *overrides: str,
    loss: float = 4.0,
    status: str = "complete",
    error: str | None = None,
    updates: int = UPDATES,
    seconds: float = 200.0,
    consensus: float = 1e-3,
    data: str = "0589d4bc80c5d8a3",
    validate_every: int = UPDATES_AN_EPOCH,
) -> Path:
    """Write a run that came to `updates` of UPDATES; only a complete one has a result.json."""
    config = config_of(*overrides)
    directory.mkdir(parents=True)
    (directory / "resolved.yaml").write_text(_yaml(config))
    (directory / ".lock").touch()
    rows = run_rows(
        loss, updates, seconds, consensus if config.decentralized.scheme != "off" else None, validate_every
    )
    if status == "complete":
        rows.append(rows[-1] | {"event": "final_validation", "loss": loss})
        write_result(directory, loss, _recipe(config), seconds, data)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_status(directory, status, **({"error": error} if error else {}))
    return directory


def write_status(directory: Path, status: str, **facts: Any) -> None:
    stated = {"status": status, "updates": UPDATES, "pid": os.getpid(), "host": socket.gethostname()}
    (directory / "status.json").write_text(json.dumps(stated | facts))


def write_result(
    directory: Path, loss: float, recipe: str, seconds: float = 200.0, data: str = "0589d4bc80c5d8a3"
) -> None:
    tokens = UPDATES * BATCH_TOKENS
    result = {
        "final_validation_loss": loss,
        "parameters": PARAMETERS,
        "updates": UPDATES,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "identity": {"recipe": recipe, "data": data},
    }
    (directory / "result.json").write_text(json.dumps(result))


def run_rows(
    loss: float, updates: int, seconds: float, consensus: float | None, validate_every: int = UPDATES_AN_EPOCH
) -> list[dict[str, Any]]:
    """Rows every ten updates, which fall towards `loss` at the last of UPDATES."""
    noise = random.Random(str(loss))
    rows: list[dict[str, Any]] = []
    for update in range(10, updates + 1, 10):
        left = 1 - update / UPDATES
        now = loss + 4.5 * math.exp(-update / 60) + 0.5 * left + 0.02 * left * noise.gauss(0, 1)
        common = {"update": update, "epoch": update // UPDATES_AN_EPOCH, "tokens": update * BATCH_TOKENS}
        train: dict[str, Any] = (
            {"event": "train"} | common | {"loss": now + 0.02, "lr": 0.005 * left, "seconds": seconds}
        )
        if consensus is not None:
            train |= {"local_losses": [now] * 4, "relative_consensus_error": consensus * (1 + left)}
        rows.append(train)
        if update % validate_every == 0:
            rows.append(
                {"event": "validation"} | common | {"loss": now, "targets": 32768, "seconds": seconds}
            )
    return rows
