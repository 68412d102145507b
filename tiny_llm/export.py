"""Export trained weights: `python -m tiny_llm.export run=DIR to=hf out=DIR [dtype=bf16]`.

to=hf opens in stock transformers as LlamaForCausalLM, Qwen3ForCausalLM or GPT2LMHeadModel; to=flax is a flat state
for flax.nnx. Exits with 1, leaving nothing, if the export does not compute what was trained.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiny_llm.config.arguments import parse_arguments
from tiny_llm.config.compose import user_errors_in_one_line
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.schema import Count


@dataclass(frozen=True)
class ExportArguments:
    run: str
    out: str
    to: Literal["hf", "flax"] = "hf"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    checkpoint: str | None = None
    worker: Count | None = None
    verify: bool = True
    device: str = "auto"


def main() -> None:
    with user_errors_in_one_line():
        arguments = parse_arguments("export", ExportArguments)
        if not arguments.out:
            raise ConfigError("out is empty: name a directory that does not exist yet")
        from tiny_llm.interop.exporting import Request, export
        from tiny_llm.interop.verification import VerificationError

        request = Request(
            arguments.run,
            arguments.checkpoint,
            arguments.worker,
            arguments.to,
            arguments.dtype,
            arguments.verify,
            arguments.device,
        )
        try:
            exported = export(request, Path(arguments.out))
        except VerificationError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        for line in exported.lines:
            print(line)
        print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
