"""environment.json: what a run ran on. Nothing is copied from the process environment."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import tiny_llm
from tiny_llm import files
from tiny_llm.config.errors import UserError
from tiny_llm.config.memory import executes_looped
from tiny_llm.config.schema import Config

PACKAGES = ("torch", "numpy", "tokenizers", "datasets", "safetensors", "hydra-core", "omegaconf", "submitit")


def describe_environment(
    config: Config, device: torch.device, identities: dict[str, str], ranks: int = 1
) -> dict[str, Any]:
    """Return versions, source, hardware, settings that were decided here, seeds and identities."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tiny_llm": tiny_llm.__version__,
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "source": describe_source(),
        "hardware": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "device": str(device),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "runtime": {
            "threads": torch.get_num_threads(),
            "precision": config.runtime.precision,
            "compile": config.runtime.compile,
            "deterministic": config.runtime.deterministic,
            "execution": "looped" if executes_looped(config) else "batched",
            "ranks": ranks,
        },
        "seeds": {
            "runtime.seed": config.runtime.seed,
            "data.shuffle_seed": config.data.shuffle_seed,
            "evaluation.seed": config.evaluation.seed,
        },
        "identities": identities,
    }


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return what environment.json says of every start; nothing, with a warning, where it is damaged."""
    if not path.exists():
        return []
    try:
        starts = [dict(start) for start in files.read_mapping(path)["starts"]]
    except (UserError, KeyError, TypeError, ValueError):
        print(f"warning: {path} is damaged: earlier starts of the run are not known", file=sys.stderr)
        return []
    return starts


def describe_source() -> dict[str, Any]:
    """Return the git commit of the code and whether it was changed since; nulls outside a checkout."""
    root = Path(tiny_llm.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": bool(_git(root, "status", "--porcelain"))}


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
