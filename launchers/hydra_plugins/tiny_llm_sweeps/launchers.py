"""The two launchers: hydra/launcher=local and hydra/launcher=slurm.

Each reads its settings as typed data, composes every point of the sweep and hands all of them to
`tiny_llm.sweeps.launch`. No job runs in this process.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from tiny_llm.config.compose import Composed
    from tiny_llm.sweeps.crew import Crew
    from tiny_llm.sweeps.sweep import Sweep


class SweepLauncher(Launcher):
    """What both launchers share; Hydra calls `setup`, then `launch` with the overrides of every point."""

    def __init__(self, **settings: Any) -> None:
        self._values = {key: _plain(value) for key, value in settings.items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config
        self._settings = self.parse(self._values)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from tiny_llm.sweeps.launch import launch

        composed = [self._compose(list(overrides)) for overrides in job_overrides]
        launch(composed, Path(str(self._config.hydra.sweep.dir)), self.crew)
        return []

    @abstractmethod
    def parse(self, values: dict[str, Any]) -> Any:
        """Return the typed settings. Raises ConfigError."""

    @abstractmethod
    def crew(self, sweep: Sweep) -> Crew:
        """Return who does the work."""

    def _compose(self, overrides: list[str]) -> Composed:
        """Compose one point. Raises ConfigError where its values would set something of the launcher."""
        from tiny_llm.config.compose import from_hydra
        from tiny_llm.config.errors import ConfigError

        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        for section in ("launcher", "sweep", "sweeper"):
            if _plain(config.hydra[section]) != _plain(self._config.hydra[section]):
                raise ConfigError(
                    f"hydra.{section} would be ignored where {' '.join(overrides)} sets it: "
                    "settings of the launcher and of Hydra cannot be swept"
                )
        return from_hydra(config, overrides)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


class LocalLauncher(SweepLauncher):
    """All runs on this machine."""

    def parse(self, values: dict[str, Any]) -> Any:
        from tiny_llm.config.parse import parse_section
        from tiny_llm.sweeps.pool import LocalSettings

        return parse_section(LocalSettings, values, "hydra.launcher")

    def crew(self, sweep: Sweep) -> Crew:
        from tiny_llm.sweeps.pool import Pool

        return Pool(sweep, self._settings)


class SlurmLauncher(SweepLauncher):
    """All runs as job arrays of a SLURM cluster."""

    def parse(self, values: dict[str, Any]) -> Any:
        from tiny_llm.config.parse import parse_section
        from tiny_llm.sweeps.array import SlurmSettings

        return parse_section(SlurmSettings, values, "hydra.launcher")

    def crew(self, sweep: Sweep) -> Crew:
        from tiny_llm.sweeps.array import Array

        return Array(sweep, self._settings)
