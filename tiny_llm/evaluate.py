"""Validation loss of a saved run, or of weights from elsewhere on its data.

python -m tiny_llm.evaluate run=DIR [checkpoint=NAME] [full=true]
python -m tiny_llm.evaluate init_from=DIR run=DIR      Hugging Face or exported weights on that run's data
python -m tiny_llm.evaluate init_from=DIR cache=DIR    the same on a token cache, in fp32
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import ConfigError


@dataclass(frozen=True)
class EvaluateArguments:
    run: str | None = None
    checkpoint: str | None = None
    init_from: str | None = None
    cache: str | None = None
    full: bool = False
    device: str = "auto"


def check(arguments: EvaluateArguments) -> None:
    """Raise ConfigError for a choice that is missing or would be ignored."""
    if arguments.run is None and arguments.init_from is None:
        raise ConfigError("run is missing: name a run directory, or weights with init_from=DIR")
    if arguments.init_from is None and arguments.cache is not None:
        raise ConfigError("cache would be ignored without init_from=DIR: a run has its own token cache")
    if arguments.init_from is not None and arguments.checkpoint is not None:
        raise ConfigError("checkpoint would be ignored with init_from=DIR: leave one of them out")


def main() -> None:
    with user_errors_in_one_line():
        arguments = parse_arguments("evaluate", EvaluateArguments)
        check(arguments)
        from tiny_llm.training.evaluation import Evaluator
        from tiny_llm.training.saved_run import open_run, open_weights

        if arguments.init_from is not None:
            saved = open_weights(arguments.init_from, arguments.run, arguments.cache, arguments.device)
        else:
            saved = open_run(str(arguments.run), arguments.checkpoint, arguments.device)
        evaluator = Evaluator(saved.config, saved.cache, saved.device)
        evaluation = evaluator.full(saved.weights) if arguments.full else evaluator.subset(saved.weights)
        split = "full" if evaluation.targets == saved.cache.validation_tokens - 1 else "subset"
        print(json.dumps({"checkpoint": saved.checkpoint, "split": split, **vars(evaluation)}))


if __name__ == "__main__":
    main()
