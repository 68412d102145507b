"""Documents to tokens, in worker processes whose results come back in the order of the documents.

In flow batches of documents; out flow the same batches with their tokens, an EOS after every document. One
worker means this process. Several are started as fresh interpreters (`python -m tiny_llm.data.encoding`)
that import little, load the saved tokenizer once and are spoken to through a socket each. At most two
batches a worker are under way: one being encoded, one waiting. Closing the generator cancels the waiting
ones and lets the running ones finish. A worker ends when its socket closes, so none outlives this process,
even one killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tiny_llm.config.errors import UserError
from tiny_llm.data.tokenizer import load

QUEUED_BATCHES = 2  # a worker
BATCH_CHARACTERS = 600_000  # `tokenizers` takes about 100 bytes of memory a token while it encodes


class EncodingError(UserError):
    """A worker that could not encode its batch."""


@dataclass(frozen=True)
class Encoded:
    """Tokens of a batch: those of document i are `tokens[ends[i] - lengths[i] : ends[i]]`, EOS included."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Batch:
    """Consecutive documents: the texts, and what each is: train, validation or duplicate."""

    texts: list[str]
    splits: list[str]


def batches(documents: Iterable[tuple[str, str]], size: int) -> Iterator[Batch]:
    """Group (split, text) documents into batches of `size`, fewer where documents are long."""
    batch, characters = Batch([], []), 0
    for split, text in documents:
        batch.splits.append(split)
        batch.texts.append(text)
        characters += len(text)
        if len(batch.texts) == size or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = Batch([], []), 0
    if batch.texts:
        yield batch


def encode(tokenizer: Tokenizer, eos_id: int, texts: list[str]) -> Encoded:
    """Return the tokens of texts on this thread alone."""
    encodings = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    lengths = np.fromiter((len(ids) + 1 for ids in encodings), np.int64, len(encodings))
    pieces = chain.from_iterable((ids, (eos_id,)) for ids in encodings)
    tokens = np.fromiter(chain.from_iterable(pieces), np.uint16, int(lengths.sum()))
    return Encoded(lengths, tokens)


def encode_in_order(
    batches: Iterable[Batch], directory: Path, eos_id: int, workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    """Encode batches with the tokenizer in `directory`; the tokens do not depend on the number of workers."""
    if workers == 1:
        tokenizer = load(directory)
        for batch in batches:
            with _one_thread():
                encoded = encode(tokenizer, eos_id, batch.texts)
            yield batch, encoded
        return
    with WorkerPool(directory, eos_id, workers) as pool:
        pending: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in batches:
            pending.append((batch, pool.submit(batch)))
            if len(pending) == QUEUED_BATCHES * workers:
                batch, future = pending.popleft()
                yield batch, future.result()
        while pending:
            batch, future = pending.popleft()
            yield batch, future.result()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Switch the threads of `tokenizers` off for a while; it reads the variable at each call."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


class WorkerPool:
    """Tokenizer processes, each started by the thread of this process that feeds it and waits for it."""

    def __init__(self, directory: Path, eos_id: int, workers: int) -> None:
        self._directory = directory
        self._eos_id = eos_id
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")  # starts them as needed
        self._own = threading.local()
        self.workers: list[Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self.workers:
            worker.close()

    def submit(self, batch: Batch) -> Future[Encoded]:
        return self._threads.submit(self._encode, batch.texts)

    def _encode(self, texts: list[str]) -> Encoded:
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(self._directory, self._eos_id)
            self.workers.append(self._own.worker)
        worker: Worker = self._own.worker
        return worker.encode(texts)


class Worker:
    """One tokenizer process and this side's end of its socket."""

    def __init__(self, directory: Path, eos_id: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    __spec__.name,
                    str(theirs.fileno()),
                    str(directory),
                    str(eos_id),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_worker_environment(),
                process_group=0,  # Ctrl-C in a terminal reaches the parent alone, which drains the workers
            )
        self._connection = Connection(ours.detach())

    def encode(self, texts: list[str]) -> Encoded:
        try:
            self._connection.send(texts)
            reply = self._connection.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            reason = " (out of memory?)" if status == -signal.SIGKILL else ""
            raise EncodingError(
                f"a tokenizer process ended with status {status}{reason}; "
                "use fewer with data.prepare_workers or smaller batches with data.batch_documents"
            ) from None
        if isinstance(reply, str):
            raise EncodingError(f"a tokenizer process failed: {reply}")
        lengths, tokens = reply
        return Encoded(lengths, tokens)

    def close(self) -> None:
        self._connection.close()
        self.process.wait()


def _worker_environment() -> dict[str, str]:
    """Return an environment in which the worker finds this very package and stays on one thread, offline."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def work(connection: Connection, directory: Path, eos_id: int) -> None:
    """Encode batches until the parent closes the connection or is gone."""
    tokenizer = load(directory)
    while True:
        try:
            texts: list[str] = connection.recv()
        except EOFError:
            return
        reply: Any
        try:
            encoded = encode(tokenizer, eos_id, texts)
            reply = (encoded.lengths, encoded.tokens)
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        connection.send(reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        work(Connection(int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
