"""The settings of the launchers as conf/hydra/launcher ships them, some changed."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from tiny_llm.config.compose import conf_directory
from tiny_llm.config.parse import parse_section
from tiny_llm.sweeps.array import SlurmSettings
from tiny_llm.sweeps.pool import LocalSettings


def slurm_settings(**changes: Any) -> SlurmSettings:
    return parse_section(SlurmSettings, _page("slurm") | changes, "hydra.launcher")


def local_settings(**changes: Any) -> LocalSettings:
    return parse_section(LocalSettings, _page("local") | changes, "hydra.launcher")


def _page(name: str) -> dict[str, Any]:
    page = OmegaConf.to_container(OmegaConf.load(conf_directory() / "hydra/launcher" / f"{name}.yaml"))
    assert isinstance(page, dict)
    return {str(key): value for key, value in page.items() if key != "_target_"}
