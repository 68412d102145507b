"""A finished or unfinished run as something to evaluate, sample from or export."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tiny_llm.config.compose import compose
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.saved import read_yaml, recipe_identity
from tiny_llm.config.schema import Config
from tiny_llm.data.cache import TokenCache, cache_directory
from tiny_llm.decentralized.arena import Layout
from tiny_llm.interop.pretrained import check_vocabulary, open_pretrained
from tiny_llm.interop.tensors import read_file
from tiny_llm.training.checkpoint import CheckpointError, load_state
from tiny_llm.training.device import open_device
from tiny_llm.training.worker_files import load_whole, newest_state, worker_directory


@dataclass(frozen=True)
class SavedRun:
    """A run's config, its token cache, the name of a checkpoint and that one's weights on a device.

    update: how many updates the weights have seen; None where they come from elsewhere.
    """

    config: Config
    cache: TokenCache
    checkpoint: str
    weights: dict[str, Tensor]
    device: torch.device
    update: int | None = None


def open_run(run: str, checkpoint: str | None, device: str, worker: int | None = None) -> SavedRun:
    """Open `checkpoint` (a file name; None: the newest) of the run directory `run`. Raises UserError.

    worker: whose weights to take; None takes the mean of all workers.
    """
    directory = Path(run)
    config = read_yaml(directory / "resolved.yaml")
    path = directory / checkpoint if checkpoint else newest_weights(directory)
    if worker is not None:
        path = _worker_file(path, config, worker)
    place = open_device(device)
    weights = {name: value.to(place) for name, value in read_weights(path, config, worker).items()}
    update, recipe = _seen_by(path)
    if recipe != recipe_identity(config):
        raise CheckpointError(
            f"{path} belongs to another recipe ({recipe[:12]}, here {recipe_identity(config)[:12]}); restore the "
            "resolved.yaml that it was made with"
        )
    cache = TokenCache.open(cache_directory(config.data), config.data)
    config = replace(config, runtime=replace(config.runtime, device=device))
    return SavedRun(config, cache, path.name, weights, place, update)


def open_weights(init_from: str, run: str | None, cache: str | None, device: str) -> SavedRun:
    """Open a directory of Hugging Face or exported weights beside data to evaluate them on. Raises UserError.

    run: a run whose data, model and settings to take, but not its weights; or cache: a token cache, and then fp32
    and the model of config.json.
    """
    if (run is None) == (cache is None):
        raise ConfigError("init_from needs data to evaluate on: give run=DIR or cache=DIR, one of the two")
    if run is not None:
        config = read_yaml(Path(run) / "resolved.yaml")
        opened = TokenCache.open(cache_directory(config.data), config.data)
        pretrained = open_pretrained(init_from, config.model)
    else:
        opened = TokenCache.read_only(Path(str(cache)))
        pretrained = open_pretrained(init_from)
        config = compose([]).config()
        config = replace(config, model=pretrained.model, runtime=replace(config.runtime, precision="fp32"))
    check_vocabulary(pretrained.directory, opened.load_tokenizer(), str(opened.directory))
    place = open_device(device)
    weights = {name: value.to(place) for name, value in pretrained.weights.items()}
    return SavedRun(config, opened, init_from, weights, place)


def _worker_file(path: Path, config: Config, worker: int) -> Path:
    """Return the file that holds a worker's weights of a checkpoint."""
    count = config.decentralized.num_models
    if worker >= count:
        raise CheckpointError(
            f"worker={worker}: the run has {count} worker{'s' if count > 1 else ''}; allowed: 0 to {count - 1}"
        )
    if path.parent.name.startswith("node-"):
        raise CheckpointError(f"worker={worker}: {path} is one worker's file already; leave worker out")
    alone = count == 1 or path.suffix != ".safetensors"
    return path if alone else worker_directory(path.parent, worker) / path.name


def _seen_by(path: Path) -> tuple[int, str]:
    """Return how many updates a checkpoint that was read before has seen, and of which recipe."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return int(file.metadata()["update"]), str(file.metadata()["recipe"])
    state = load_state(path, verify=False)
    return int(state["update"]), str(state["identity"]["recipe"])


def newest_weights(directory: Path) -> Path:
    """Return the newest training state, or the last epoch's weights where no state was kept."""
    try:
        return newest_state(directory)
    except CheckpointError:
        weights = sorted(directory.glob("epoch-*.safetensors"))
        if not weights:
            raise
        return weights[-1]


def read_weights(path: Path, config: Config, worker: int | None = None) -> dict[str, Tensor]:
    """Return a checkpoint's weights (of several workers: their mean, or one's) by name, on the CPU.

    Raises UserError for a missing or damaged file, and for weights of another model.
    """
    weights = read_file(path) if path.suffix == ".safetensors" else _read_state(path, config, worker)
    expected = {spec.name: spec.shape for spec in parameter_specs(config.model)}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if found != expected:
        wrong = sorted(set(expected.items()) ^ set(found.items()))
        raise CheckpointError(
            f"{path} holds another model: {', '.join(f'{n} {list(s)}' for n, s in wrong[:4])}"
        )
    return weights


def _read_state(path: Path, config: Config, worker: int | None) -> dict[str, Tensor]:
    state = load_state(path, verify=False)
    if "index" in state:  # one worker's file
        return dict(state["weights"])
    arena = load_whole(path)["parameters"] if "workers" in state else state["parameters"]
    layout = Layout.of(parameter_specs(config.model))
    if arena.shape[-1] != layout.size:
        raise CheckpointError(
            f"{path} holds another model: rows of {arena.shape[-1]} elements, not {layout.size}"
        )
    if worker is not None:
        return layout.views(arena[worker])
    return layout.views(arena.mean(0, dtype=torch.promote_types(arena.dtype, torch.float32)))
