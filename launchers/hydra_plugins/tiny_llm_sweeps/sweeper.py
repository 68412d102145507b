"""The grid of a sweep: Hydra's own, handed to the launcher whole.

Hydra's BasicSweeper composes every point once more than needed and leaves a multirun.yaml behind even when
nothing was started; sweep.json holds what is worth keeping.
"""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser


class GridSweeper(BasicSweeper):
    """Every combination of the swept values, as one batch."""

    def sweep(self, arguments: list[str]) -> Any:
        assert self.launcher is not None
        assert self.hydra_context is not None
        if self.max_batch_size is not None:
            from tiny_llm.config.errors import ConfigError

            raise ConfigError(
                f"hydra.sweeper.max_batch_size={self.max_batch_size} would be ignored: limit how many runs there "
                "are at once with hydra.launcher.max_parallel (local) or array_parallelism (slurm)"
            )
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        (points,) = self.split_arguments(overrides, None)
        return [self.launcher.launch(points, initial_job_idx=0)]
