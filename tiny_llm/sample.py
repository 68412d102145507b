"""Continue texts: `python -m tiny_llm.sample run=DIR prompt="..." max_new_tokens=64`.

init_from=DIR takes Hugging Face or exported weights and their tokenizer instead of a run.

One text is shown as it comes. Several (`prompts='["Once", "The"]'`, num_samples=3) are sampled together and
shown one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import compose, user_errors_in_one_line
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.schema import NonNegative, PositiveInt, Seed, Share

if TYPE_CHECKING:
    from tiny_llm.training.sampling import TextSampler


@dataclass(frozen=True)
class SampleArguments:
    run: str | None = None
    init_from: str | None = None
    prompt: str | None = None
    prompts: tuple[str, ...] = ()
    num_samples: PositiveInt = 1
    checkpoint: str | None = None
    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 0.8
    top_k: PositiveInt | None = 50
    top_p: Share | None = None
    seed: Seed = 0
    device: str = "auto"


def main() -> None:
    with user_errors_in_one_line():
        arguments = parse_arguments("sample", SampleArguments)
        if (arguments.prompt is None) == (not arguments.prompts):
            raise ConfigError("sample wants either prompt=TEXT or prompts=[TEXT, TEXT]")
        prompts = arguments.prompts if arguments.prompt is None else (arguments.prompt,)
        sampler = open_sampler(arguments)
        show(sampler, prompts, arguments.num_samples)


def open_sampler(arguments: SampleArguments) -> TextSampler:
    """Open the run or the weights that texts are continued with. Raises UserError."""
    if (arguments.run is None) == (arguments.init_from is None):
        raise ConfigError("sample wants either run=DIR or init_from=DIR")
    if arguments.init_from is not None and arguments.checkpoint is not None:
        raise ConfigError("checkpoint would be ignored with init_from=DIR: leave one of them out")
    from tiny_llm.models.generation import Sampling
    from tiny_llm.training.sampling import TextSampler

    choice = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    settings = (arguments.max_new_tokens, choice, arguments.seed)
    if arguments.init_from is not None:
        from tiny_llm.interop.opened import open_model

        opened = open_model(Path(arguments.init_from), arguments.device)
        config = replace(compose([]).config(), model=opened.model)
        return TextSampler(config, opened.weights, opened, *settings)
    from tiny_llm.training.saved_run import open_run

    saved = open_run(str(arguments.run), arguments.checkpoint, arguments.device)
    return TextSampler(saved.config, saved.weights, saved.cache, *settings)


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
