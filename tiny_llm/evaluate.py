"""Validation loss of a saved run: `python -m tiny_llm.evaluate run=DIR [checkpoint=NAME] [full=true]`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import user_errors_in_one_line


@dataclass(frozen=True)
class EvaluateArguments:
    run: str
    checkpoint: str | None = None
    full: bool = False
    device: str = "auto"


def main() -> None:
    with user_errors_in_one_line():
        arguments = parse_arguments("evaluate", EvaluateArguments)
        from tiny_llm.training.evaluation import Evaluator
        from tiny_llm.training.saved_run import open_run

        saved = open_run(arguments.run, arguments.checkpoint, arguments.device)
        evaluator = Evaluator(saved.config, saved.cache, saved.device)
        evaluation = evaluator.full(saved.weights) if arguments.full else evaluator.subset(saved.weights)
        split = "full" if arguments.full else "subset"
        print(json.dumps({"checkpoint": saved.checkpoint, "split": split, **vars(evaluation)}))


if __name__ == "__main__":
    main()
