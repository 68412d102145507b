"""Corpora and tokenizers of the Hugging Face Hub.

Revisions such as `main` are resolved to commit ids once, before anything is read, and the manifest keeps
them. Documents are streamed with `datasets`, the official validation split before the training split;
nothing is stored but their tokens. A request that fails is tried data.attempts times with growing pauses; a
stream that breaks goes on with the document after the last one delivered. What stays broken becomes one
line that says how to go on.

`datasets` takes seconds to import, so this file is imported only where a Hub corpus is used.
"""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import datasets
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from tiny_llm.config.schema import HubCorpus, TextCorpus
from tiny_llm.data.command import prepare_command
from tiny_llm.data.corpora import CorpusError, Report, missing_field
from tiny_llm.data.manifest import Split

Answer = TypeVar("Answer")

FIRST_PAUSE = 2.0  # seconds; doubles from one attempt to the next
LONGEST_PAUSE = 60.0
STATE_DOCUMENTS = 1000  # documents between two snapshots of a stream's position
HTTP_ERROR: type[Exception] = hub_errors.HTTPError  # type: ignore[attr-defined]  # of whichever client it uses
TEXT_ATTEMPTS = 5  # for the tokenizer of data=text, which has no data.attempts


class HubDataset:
    """A dataset of the Hub at one commit."""

    def __init__(self, data: HubCorpus, report: Report) -> None:
        _silence()
        self._data = data
        self._patience = Patience(data, f"the dataset {data.dataset}", data.attempts, report)
        self.revision: str | None = self._patience.ask(
            lambda: HfApi().dataset_info(data.dataset, revision=data.revision).sha
        )

    def sources(self) -> dict[str, Any]:
        return {"dataset": self._data.dataset, "subset": self._data.subset}

    def estimated_bytes(self) -> int:
        raise NotImplementedError("no tokenizer is trained on a Hub corpus")

    def documents(self) -> Iterator[tuple[Split | None, str]]:
        validation = self._data.validation_split
        if validation is not None:
            for text in self._stream(validation):
                yield "validation", text
        for text in self._stream(self._data.train_split):
            yield None if validation is None else "train", text

    def _stream(self, split: str) -> Iterator[str]:
        """Yield every document of a split once, across broken connections."""
        state: dict[str, Any] | None = None
        since = 0  # documents delivered after `state` was taken
        while True:
            try:
                stream = self._open(split)
                if state is not None:
                    stream.load_state_dict(state)
                for record in itertools.islice(stream, since, None):
                    yield self._text_of(record, split)
                    self._patience.failures = 0
                    since += 1
                    if since == STATE_DOCUMENTS:
                        state, since = stream.state_dict(), 0
                return
            except CorpusError:
                raise
            except Exception as error:  # `datasets` lets through whatever its readers raise
                self._patience.pause(error)

    def _open(self, split: str) -> datasets.IterableDataset:
        data = self._data
        return datasets.load_dataset(
            data.dataset, data.subset, split=split, revision=self.revision, streaming=True
        )

    def _text_of(self, record: dict[str, Any], split: str) -> str:
        field = self._data.text_field
        text = record.get(field)
        if isinstance(text, str):
            return text
        place = f"the dataset {self._data.dataset}, split {split}"
        if field not in record:
            raise missing_field(place, field, list(record))
        raise CorpusError(f"{place}: the field '{field}' of a document is {text!r:.40}, not text")


def fetch_tokenizer(data: HubCorpus | TextCorpus, report: Report) -> tuple[Path, str]:
    """Download tokenizer.json and what names its EOS; return the path and the resolved commit id."""
    _silence()
    attempts, requested = TEXT_ATTEMPTS, "main"
    if isinstance(data, HubCorpus):
        attempts, requested = data.attempts, data.tokenizer_revision
    patience = Patience(data, f"the tokenizer {data.tokenizer}", attempts, report)
    revision = patience.ask(lambda: HfApi().model_info(data.tokenizer, revision=requested).sha)
    assert revision is not None

    def download(name: str) -> Path:
        return Path(hf_hub_download(data.tokenizer, name, revision=revision))

    def download_neighbours() -> None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            try:
                download(name)
            except LocalEntryNotFoundError:  # the Hub could not be asked
                raise
            except EntryNotFoundError:
                continue

    patience.ask(download_neighbours)
    return patience.ask(lambda: download("tokenizer.json")), revision


class Patience:
    """Bounded back-off: counts failures in a row, and gives up with a line that says how to go on."""

    def __init__(self, data: HubCorpus | TextCorpus, what: str, attempts: int, report: Report) -> None:
        self.failures = 0
        self._data = data
        self._what = what
        self._attempts = attempts
        self._report = report

    def ask(self, request: Callable[[], Answer]) -> Answer:
        """Return the answer of a request, tried again while its failures look passing. Raises CorpusError."""
        while True:
            try:
                answer = request()
            except Exception as error:
                self.pause(error)
            else:
                self.failures = 0
                return answer

    def pause(self, error: Exception) -> None:
        """Sleep before another attempt. Raises CorpusError when there should be none."""
        self.failures += 1
        if not _is_passing(error) or self.failures >= self._attempts:
            tries = f" after {self.failures} attempts" if self.failures > 1 else ""
            raise CorpusError(
                f"cannot read {self._what} of the Hugging Face Hub{tries}: {_one_line(error)}; "
                f"try again with: {prepare_command(self._data)}, or go on without it: {self._without()}"
            ) from error
        seconds = min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE)
        self._report(
            f"prepare: {self._what}: {_one_line(error)}; attempt {self.failures + 1} of {self._attempts} "
            f"in {seconds:g} s"
        )
        time.sleep(seconds)

    def _without(self) -> str:
        if isinstance(self._data, TextCorpus):
            return "data.tokenizer=bpe trains one on your files"
        return "data=text data.paths=['FILES'] with your own files, or experiment=quickstart"


def _is_passing(error: Exception) -> bool:
    """Whether a later attempt may succeed: connections, time-outs and the server's own errors."""
    if isinstance(error, LocalEntryNotFoundError):  # not on the disk, and the Hub could not be asked
        return True
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if isinstance(error, EntryNotFoundError | FileNotFoundError | hub_errors.OfflineModeIsEnabled):
        return False
    return isinstance(error, (OSError, HTTP_ERROR, EOFError, zlib.error))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _silence() -> None:
    """Leave telling to this room, and retrying a broken stream too.

    `datasets` retries a read that failed on the decompressed side of a gzip file, where what had been read
    before the failure is lost: a stream opened anew loses nothing.
    """
    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub", "fsspec", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 0
