"""Does an export compute what was trained? Stock transformers loads it and is compared with this program.

Three comparisons on held-out data: the logits of 64 sequences, in fp32 arithmetic on the exported numbers (so a
bf16 export is held to the same 1e-4); the tokenizer's ids; and greedy continuations of fixed prompts token by
token, by transformers in the export's own dtype against the weights as they were trained. The continuations decide
for fp32; for fp16 and bf16, which round, they are told.

B sequences  T positions  V vocabulary
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_llm.data.cache import TokenCache
from tiny_llm.data.validation import validation_blocks
from tiny_llm.interop.tensors import ExchangeError, converted
from tiny_llm.models.decoder import Decoder
from tiny_llm.training.saved_run import SavedRun

TOLERANCE = 1e-4  # of a logit
SEQUENCES, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 16, 32
SEED = 0  # draws the sequences
LOGITS_AT_ONCE = 2**24


class VerificationError(ExchangeError):
    """An export that does not compute what was trained; it is not kept."""


@dataclass(frozen=True)
class Verdict:
    """How an export compares. `partings`: for each continuation that differs, after how many equal tokens."""

    dtype: str
    sequences: int
    largest_difference: float
    prompts: int
    new_tokens: int
    partings: tuple[int, ...]
    undecided: int
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return what was compared and found, for a terminal and for the model card."""
        same = self.prompts - len(self.partings)
        where = ""
        if self.partings:
            where = f"; the others part after {', '.join(map(str, self.partings))} tokens"
            if self.undecided:
                where += f" ({self.undecided} where two logits are within {2 * TOLERANCE:g})"
        return [
            f"logits of {self.sequences} held-out sequences: largest difference {self.largest_difference:.2g} "
            f"from transformers, in fp32 arithmetic on the {self.dtype} weights (limit {TOLERANCE:g})",
            f"greedy continuations of {self.prompts} prompts, {self.new_tokens} tokens each, transformers in "
            f"{self.dtype} against the trained weights in fp32: {same} identical{where}",
        ]


def require_transformers() -> None:
    """Raise ExchangeError where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ExchangeError(
            "verify=true compares with transformers, which is not installed; pip install 'tiny-llm[hf]', or set "
            "verify=false"
        )


def verify(directory: Path, saved: SavedRun, dtype: str) -> Verdict:
    """Compare the export in `directory` with the weights it was made from."""
    blocks, _ = validation_blocks(saved.cache, saved.config.model.context_length, SEQUENCES, SEED)
    tokens_BT = torch.from_numpy(blocks[:, :-1].astype("int64")).to(saved.device)
    with _quiet():
        problems = _tokenizer_problems(directory, saved.cache, tokens_BT)
        theirs, found = _load(directory, torch.float32, saved.device)
        ours = _decoder(
            saved, {name: value.float() for name, value in converted(saved.weights, dtype).items()}
        )
        difference = largest_difference(ours, theirs, tokens_BT)
        if dtype != "fp32":
            theirs, _ = _load(directory, None, saved.device)
            ours = _decoder(saved, saved.weights)
        prompts, new = continuations(theirs, tokens_BT, saved.cache.eos_id)
    partings, margins = part(ours, prompts, new)
    undecided = sum(margin <= 2 * TOLERANCE for margin in margins)
    problems += found
    if not difference <= TOLERANCE:
        problems.append(f"logits differ by up to {difference:.3g}, more than {TOLERANCE:g}")
    if dtype == "fp32" and len(partings) > undecided:
        problems.append(f"{len(partings) - undecided} of {len(prompts)} greedy continuations differ")
    return Verdict(
        dtype,
        len(tokens_BT),
        difference,
        len(prompts),
        new.shape[1],
        tuple(partings),
        undecided,
        tuple(problems),
    )


def _decoder(saved: SavedRun, weights: Mapping[str, Tensor]) -> Decoder:
    decoder = Decoder(saved.config.model).to(saved.device)
    decoder.load_state_dict(dict(weights))
    return decoder


def _load(directory: Path, dtype: torch.dtype | None, device: torch.device) -> tuple[Any, list[str]]:
    """Return the model as its users load it (dtype None: as exported), and what is wrong with it."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
    )
    problems = [
        f"transformers reports {key}: {info[key]}"
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[key]
    ]
    if model.config.architectures != [type(model).__name__]:
        problems.append(f"transformers opens it as {type(model).__name__}, not {model.config.architectures}")
    return model.to(device).eval(), problems


@torch.no_grad()
def largest_difference(ours: Decoder, theirs: Any, tokens_BT: Tensor) -> float:
    """Return the largest difference of a logit between the two models."""
    rows = max(1, LOGITS_AT_ONCE // (tokens_BT.shape[1] * ours.model.vocab_size))
    largest = 0.0
    for start in range(0, len(tokens_BT), rows):
        batch_BT = tokens_BT[start : start + rows]
        difference_BTV = (ours(batch_BT) - theirs(batch_BT, use_cache=False).logits.float()).abs()
        largest = max(largest, float(difference_BTV.nan_to_num(torch.inf).max()))
    return largest


def continuations(theirs: Any, tokens_BT: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """Return prompts [B, T] from the held-out sequences and their greedy continuations [B, T'] by transformers."""
    from transformers import GenerationConfig

    length = tokens_BT.shape[1]
    prompt = max(1, min(PROMPT_TOKENS, length // 2))
    new = min(NEW_TOKENS, length - prompt)
    prompts_BT = tokens_BT[:PROMPTS, :prompt]
    theirs.generation_config = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=eos_id
    )
    continued_BT = theirs.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT))
    return prompts_BT, continued_BT[:, prompt:]


@torch.no_grad()
def part(ours: Decoder, prompts_BT: Tensor, new_BT: Tensor) -> tuple[list[int], list[float]]:
    """Return where greedy continuations part from ours: equal tokens before, and by how much ours is likelier.

    One pass over their tokens finds it: up to the first that we would not choose, both have seen the same.
    """
    logits_BTV = ours(torch.cat([prompts_BT, new_BT], 1))[:, prompts_BT.shape[1] - 1 : -1]
    partings, margins = [], []
    for logits_TV, new_T in zip(logits_BTV, new_BT, strict=True):
        different = (logits_TV.argmax(-1) != new_T).nonzero()
        if len(different):
            at = int(different[0])
            partings.append(at)
            margins.append(float(logits_TV[at].max() - logits_TV[at, new_T[at]]))
    return partings, margins


def _tokenizer_problems(directory: Path, cache: TokenCache, tokens_BT: Tensor) -> list[str]:
    """Compare ids of held-out text, and the token that ends a document."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ours = cache.load_tokenizer()
    texts = [ours.decode(row, skip_special_tokens=True) for row in tokens_BT[:PROMPTS].tolist()]
    problems = []
    if any(theirs(text)["input_ids"] != ours.encode(text, add_special_tokens=False).ids for text in texts):
        problems.append("AutoTokenizer gives other ids than the run's tokenizer")
    if theirs.eos_token_id != cache.eos_id:
        problems.append(f"AutoTokenizer's EOS is {theirs.eos_token_id}, not {cache.eos_id}")
    return problems


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
