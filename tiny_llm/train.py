"""Train a model: `python -m tiny_llm.train model=20m optimizer.lr=0.003`, or that many ranks of it with torchrun."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_llm.config.compose import Composed, hydra_door
from tiny_llm.config.placement import Placement, find_placement, quieten_torch, torchrun_started
from tiny_llm.config.plan import make_plan
from tiny_llm.decentralized.topology import make_topology
from tiny_llm.training.resume import Resume, continuation, resumed


def train(composed: Composed) -> None:
    placement = find_placement()
    resume = _resume(composed, placement)
    config = resume.config if resume else composed.config()
    plan = make_plan(config, placement.world)
    make_topology(num_models=plan.num_models, **vars(config.topology))
    if config.dry_run:
        if placement.first:
            print(json.dumps(plan.summary(), indent=2))
        return
    if placement.world > 1:
        quieten_torch()
    from tiny_llm.training.start import run  # torch: not needed to look at a plan

    run(plan, resume, placement, again=placement.restarts > 0)


def _resume(composed: Composed, placement: Placement) -> Resume | None:
    """Return what to go on from: what resume= names, or what an attempt left that torchrun or SLURM restarted."""
    started = torchrun_started()
    if started and "output_dir" not in composed.chosen:  # one directory for all ranks and attempts
        composed.values["output_dir"] = started.strftime("outputs/%Y-%m-%d/%H-%M-%S")
    directory = Path(str(composed.values["output_dir"]))
    if placement.restarts and (directory / "resolved.yaml").exists():
        return continuation(directory, composed.config(), placement.world)
    return resumed(composed, placement.world) if composed.values["resume"] else None


main = hydra_door(train, sweeps=True)

if __name__ == "__main__":
    main()
