"""Tokenizers: a byte-level BPE trained here, or a tokenizer.json from a file or the Hub.

Whatever its source, a cache keeps it as `tokenizer/tokenizer.json` with a tokenizer_config.json that names
the end-of-document token, so that it also loads in `transformers`. In flow texts or a directory that holds
a tokenizer.json; out flow the saved files and the `TokenizerFacts` that the manifest records. Encoding here
never adds, truncates, pads or drops anything, and a special token spelled out in a document is ordinary
text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_llm.config.errors import UserError

EOS = "<|endoftext|>"
KNOWN_EOS = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]")
LARGEST_VOCABULARY = 65_536  # tokens are stored as uint16
SAMPLE_BYTES = 64_000_000  # of UTF-8 text that a BPE is trained on


class TokenizerError(UserError):
    """A tokenizer that cannot be used for a cache."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What the manifest says of a tokenizer; `fingerprint` is the SHA-256 of tokenizer.json."""

    source: str
    revision: str | None
    fingerprint: str
    entries: int
    eos_token: str
    eos_id: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> TokenizerFacts:
    """Train a byte-level BPE of at most `vocab_size` entries and save it: the same texts give the same bytes.

    Learns from the first SAMPLE_BYTES of the texts, which are not held in memory together. A small corpus may
    fill fewer entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(texts, SAMPLE_BYTES), trainer)
    return save(tokenizer.to_str().encode(), EOS, directory, source="bpe", revision=None)


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        piece = text[:limit]
        yield piece
        limit -= len(piece.encode())


def save(
    content: bytes, eos_token: str, directory: Path, source: str, revision: str | None
) -> TokenizerFacts:
    """Save the bytes of a tokenizer.json and its EOS. Raises TokenizerError when it cannot serve."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    vocabulary = load(directory).get_vocab(with_added_tokens=True)
    if eos_token not in vocabulary:
        raise TokenizerError(f"the tokenizer {source} names {eos_token!r} as its EOS but has no such token")
    return TokenizerFacts(
        source=source,
        revision=revision,
        fingerprint=hashlib.sha256(content).hexdigest(),
        entries=max(vocabulary.values()) + 1,  # ids may have gaps: the largest one counts
        eos_token=eos_token,
        eos_id=vocabulary[eos_token],
    )


def import_tokenizer(source: Path, name: str, revision: str | None, directory: Path) -> TokenizerFacts:
    """Copy the tokenizer.json at `source` and the EOS that its neighbours name into `directory`."""
    try:
        content = source.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except OSError as error:
        raise TokenizerError(f"data.tokenizer={name}: cannot read {source}: {error.strerror}") from None
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"data.tokenizer={name}: {source} is no tokenizer.json: {error}") from None
    return save(content, find_eos(tokenizer, source, name), directory, name, revision)


def find_eos(tokenizer: Tokenizer, source: Path, name: str) -> str:
    """Return the end-of-document token: what the files beside tokenizer.json name, else a well-known one.

    Raises TokenizerError when there is none.
    """
    for neighbour in ("tokenizer_config.json", "special_tokens_map.json"):
        path = source.with_name(neighbour)
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
        except (ValueError, AttributeError):
            raise TokenizerError(f"data.tokenizer={name}: {path} is not a JSON object") from None
        token = named.get("content") if isinstance(named, dict) else named
        if token:
            return str(token)
    for token in KNOWN_EOS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise TokenizerError(
        f'data.tokenizer={name}: no end-of-document token; name it as {{"eos_token": "..."}} in '
        f"{source.with_name('tokenizer_config.json')}, or add one of {', '.join(KNOWN_EOS)}"
    )


def check_vocabulary(facts: TokenizerFacts, vocab_size: int) -> None:
    """Raise TokenizerError unless every id fits into uint16 and under data.vocab_size."""
    if facts.entries > LARGEST_VOCABULARY:
        raise TokenizerError(
            f"data.tokenizer={facts.source} has {facts.entries:,} entries; a cache stores tokens in 16 bits, "
            f"so at most {LARGEST_VOCABULARY:,} are possible: choose a smaller tokenizer"
        )
    if facts.entries > vocab_size:
        raise TokenizerError(
            f"data.vocab_size={vocab_size} is smaller than the {facts.entries} entries of the tokenizer "
            f"{facts.source}; set data.vocab_size={facts.entries}"
        )


def load(directory: Path) -> Tokenizer:
    """Load a saved tokenizer so that it encodes the whole of a text and nothing else. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path} is damaged or missing: {error}; restore a copy of it") from None
    tokenizer.no_truncation()  # a tokenizer.json of the Hub may carry a model's length limit
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # '</s>' inside a document must not end it
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # encoding would be random
    return tokenizer
