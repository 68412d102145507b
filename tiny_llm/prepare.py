"""Make or verify a token cache: `python -m tiny_llm.prepare data=stdlib`."""

from __future__ import annotations

from tiny_llm.config.compose import Composed, hydra_door
from tiny_llm.config.plan import make_plan


def prepare(composed: Composed) -> None:
    plan = make_plan(composed.config())
    from tiny_llm.data.prepare import prepare

    prepare(plan.config.data, plan.targets_needed, print)


main = hydra_door(prepare)

if __name__ == "__main__":
    main()
