"""Continue texts: `python -m tiny_llm.sample run=DIR prompt="..." max_new_tokens=64`.

One text is shown as it comes. Several (`prompts='["Once", "The"]'`, num_samples=3) are sampled together and
shown one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.schema import Count, NonNegative, PositiveInt, Share

if TYPE_CHECKING:
    from tiny_llm.training.sampling import TextSampler


@dataclass(frozen=True)
class SampleArguments:
    run: str
    prompt: str | None = None
    prompts: tuple[str, ...] = ()
    num_samples: PositiveInt = 1
    checkpoint: str | None = None
    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 0.8
    top_k: PositiveInt | None = 50
    top_p: Share | None = None
    seed: Count = 0
    device: str = "auto"


def main() -> None:
    with user_errors_in_one_line():
        arguments = parse_arguments("sample", SampleArguments)
        if (arguments.prompt is None) == (not arguments.prompts):
            raise ConfigError("sample wants either prompt=TEXT or prompts=[TEXT, TEXT]")
        prompts = arguments.prompts if arguments.prompt is None else (arguments.prompt,)
        from tiny_llm.models.generation import Sampling
        from tiny_llm.training.sampling import TextSampler
        from tiny_llm.training.saved_run import open_run

        saved = open_run(arguments.run, arguments.checkpoint, arguments.device)
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
        show(
            TextSampler(
                saved.config, saved.weights, saved.cache, arguments.max_new_tokens, sampling, arguments.seed
            ),
            prompts,
            arguments.num_samples,
        )


def show(sampler: TextSampler, prompts: Sequence[str], num_samples: int) -> None:
    """Print one text piece by piece, several each under a heading."""
    if len(prompts) * num_samples == 1:
        for _, piece in sampler.stream(prompts):
            _write(piece)
        _write("\n")
        return
    for number, text in enumerate(sampler.texts(prompts, num_samples)):
        prompt, sample = divmod(number, num_samples)
        _write(f"--- prompt {prompt + 1}, sample {sample + 1}\n{text}\n")


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
