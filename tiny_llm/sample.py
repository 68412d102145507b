"""Continue a text: `python -m tiny_llm.sample run=DIR prompt="..." max_new_tokens=64`."""

from __future__ import annotations

from dataclasses import dataclass

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.schema import Count, NonNegative, PositiveInt


@dataclass(frozen=True)
class SampleArguments:
    run: str
    prompt: str
    checkpoint: str | None = None
    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 0.8
    top_k: PositiveInt | None = 50
    seed: Count = 0
    device: str = "auto"


def main() -> None:
    with user_errors_in_one_line():
        arguments = parse_arguments("sample", SampleArguments)
        from tiny_llm.training.sampling import continue_text
        from tiny_llm.training.saved_run import open_run

        saved = open_run(arguments.run, arguments.checkpoint, arguments.device)
        text = continue_text(
            saved.config,
            saved.weights,
            saved.cache,
            arguments.prompt,
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.top_k,
            arguments.seed,
        )
        print(text.encode("utf-8", "replace").decode("utf-8"))


if __name__ == "__main__":
    main()
