"""Train a model: `python -m tiny_llm.train model=20m optimizer.lr=0.003`."""

from __future__ import annotations

import json

from tiny_llm.config.compose import Composed, hydra_door
from tiny_llm.config.plan import make_plan
from tiny_llm.decentralized.topology import make_topology
from tiny_llm.training.resume import resumed


def train(composed: Composed) -> None:
    resume = resumed(composed) if composed.values["resume"] else None
    config = resume.config if resume else composed.config()
    plan = make_plan(config)
    make_topology(num_models=plan.num_models, **vars(config.topology))
    if config.dry_run:
        print(json.dumps(plan.summary(), indent=2))
        return
    from tiny_llm.training.start import run  # torch: not needed to look at a plan

    run(plan, resume)


main = hydra_door(train, sweeps=True)

if __name__ == "__main__":
    main()
