"""The processes that train one run together, and what they tell one another.

`Ranks` is all that the trainer knows of torch.distributed: alone, every method gives back what it got. Tensors go
through the process group (Gloo on CPUs, NCCL on GPUs); words go through its store, where waiting has no limit as
long as the others show signs of life (`watch.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tiny_llm.config.errors import UserError
from tiny_llm.config.placement import Placement
from tiny_llm.distributed.watch import RankLostError, Watch

NCCL_GRACE_SECONDS = 60  # NCCL ends the process without a word; the watch, which has one, must come first
POLL_SECONDS = 0.05
PARTING_SECONDS = 10.0


class Ranks:
    """This process's ties to the others of a run. Open them with `open_ranks`."""

    def __init__(
        self, placement: Placement, device: torch.device, store: Any = None, watch: Watch | None = None
    ) -> None:
        self.rank, self.world, self.first = placement.rank, placement.world, placement.first
        self.device = device
        self._store, self._watch = store, watch
        self._words = 0
        self.seconds_talking = 0.0  # that the training thread spent in communication

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Turn an error of communication into one that names the rank behind it."""
        if self._watch is None:
            yield
            return
        self._watch.tell(talking=True)
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            lost = self._watch.blame()
            lost.add_note(str(error))
            raise lost from None
        finally:
            self._watch.tell(talking=False)
            self.seconds_talking += time.perf_counter() - start

    def at_update(self, update: int) -> None:
        """Let the others see which update this rank is in."""
        if self._watch is not None:
            self._watch.tell(update=update)

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        if self.world > 1:
            with self.talking():
                dist.all_reduce(tensor)

    def largest(self, *numbers: float) -> list[float]:
        """Return the largest of each number over all ranks."""
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        with self.talking():
            dist.all_reduce(values, dist.ReduceOp.MAX)
            return list(values.tolist())

    def gathered(self, values_M: Tensor) -> Tensor:
        """Return every rank's values [M] as [world, M]."""
        if self.world == 1:
            return values_M[None]
        all_WM = values_M.new_empty(self.world, len(values_M))
        with self.talking():
            dist.all_gather(list(all_WM.unbind()), values_M)
        return all_WM

    def collected(self, rows_ND: Tensor) -> Tensor | None:
        """Return the rows of all ranks, in their order, on the CPU of the first rank; None on the others."""
        if self.world == 1:
            return rows_ND
        with self.talking():
            if not self.first:
                for row in rows_ND:
                    dist.send(row, 0)
                return None
            own = len(rows_ND)
            all_rows = torch.empty(self.world * own, rows_ND.shape[1], dtype=rows_ND.dtype)
            all_rows[:own] = rows_ND
            received = torch.empty_like(rows_ND[0])
            for i in range(own, len(all_rows)):
                dist.recv(received, i // own)
                all_rows[i] = received
            return all_rows

    def words(self, word: str) -> list[str]:
        """Return what every rank says, in the order of ranks; waits for all as long as they live."""
        if self.world == 1:
            return [word]
        self._words += 1
        keys = [f"words/{self._words}/{rank}" for rank in range(self.world)]
        with self.talking():
            self._store.set(keys[self.rank], word)
            return [self._awaited(key) for key in keys]

    def told(self, value: Any) -> Any:
        """Return the first rank's value, plain data, on every rank."""
        return json.loads(self.words(json.dumps(value if self.first else None))[0])

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Have the first rank do the work alone, and the others after it, whether it succeeded or not."""
        if not self.first:
            self.told(None)
            yield
            return
        try:
            yield
        finally:
            self.told(None)

    def part(self) -> None:
        """Leave together; the first rank, who may keep the store, leaves last."""
        self.words("done")
        keys = [f"left/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], "")
        deadline = time.monotonic() + PARTING_SECONDS
        while self.first and not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        dist.destroy_process_group()

    def _awaited(self, key: str) -> str:
        assert self._watch is not None
        while not self._store.check([key]):
            if (lost := self._watch.lost(self._watch.timeout)) is not None:
                raise lost
            time.sleep(POLL_SECONDS)
        return str(self._store.get(key).decode())


def alone(device: torch.device) -> Ranks:
    return Ranks(Placement(), device)


@contextlib.contextmanager
def open_ranks(
    placement: Placement,
    device: torch.device,
    timeout_seconds: float,
    last_words: Callable[[RankLostError], None] = lambda _: None,
    agreed_end: type[Exception] | tuple[()] = (),
) -> Iterator[Ranks]:
    """Join the other ranks of the run and part from them at the end.

    last_words: called with who was lost when the process must end in the midst of something. agreed_end: an exception
    that all ranks raise together. Raises UserError when the ranks do not come together, RankLostError when one of
    them is lost later.
    """
    if placement.world == 1:
        yield alone(device)
        return
    store = _join(placement, device, timeout_seconds)
    watch = Watch(store.clone(), placement.rank, placement.world, timeout_seconds, last_words)
    ranks = Ranks(placement, device, store, watch)
    try:
        try:
            yield ranks
        except agreed_end:
            ranks.part()
            raise
        ranks.part()
    except agreed_end:
        raise
    except BaseException as error:
        watch.fail(error)
        time.sleep(3 * watch.interval)  # the first rank may keep the store: let the others read why
        atexit.register(_leave)
        raise
    finally:
        watch.close()


def _leave() -> None:
    """End a process that has said why: its half of broken connections would abort it while it is taken apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _join(placement: Placement, device: torch.device, timeout_seconds: float) -> Any:
    """Make the process group and return its store."""
    limit = datetime.timedelta(seconds=timeout_seconds)
    cuda = device.type == "cuda"
    try:
        store, rank, world = next(
            dist.rendezvous("env://", placement.rank, placement.world, timeout=limit)  # type: ignore[attr-defined]
        )
        # torchrun's store outlives an attempt, and holds what its ranks said.
        store = dist.PrefixStore(f"attempt/{placement.restarts}", store)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world,
            timeout=limit + datetime.timedelta(seconds=NCCL_GRACE_SECONDS if cuda else 0),
            device_id=device if cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"could not meet the other ranks of {placement.world}: {str(error).splitlines()[0].rstrip('.')}; check "
            "that all were started, with the same MASTER_ADDR and MASTER_PORT, or raise "
            f"runtime.timeout_seconds={timeout_seconds:g}"
        ) from None
    return store
