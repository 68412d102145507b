"""Signs of life: each rank leaves a pulse in a shared store and looks at the others'.

A rank that is killed, stopped or fails makes the others' communication fail or wait for ever. The pulses say which
rank it was, so that all others end within a bounded time with its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny_llm.config.errors import UserError

BEATS_MISSED = 4  # after which a rank counts as silent where communication with it has failed
PATIENCE_SECONDS = 5.0  # that the training thread gets to end by itself before the watch ends the process


class RankLostError(UserError):
    """Another rank died, hangs or failed; the message names it."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Pulse:
    """What a rank says of itself."""

    beat: int = 0
    update: int = 0
    talking: bool = False
    failure: str | None = None
    lost: bool = False  # the failure is that it lost contact with another


class Watch:
    """This rank's pulse and what is known of the others'.

    One thread converses with the store, for which it has a client of its own: a store whose host is stopped keeps it
    waiting for ever. Another looks at the clock, and ends a process whose training thread does not end by itself,
    after a call of last_words.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout_seconds: float,
        last_words: Callable[[RankLostError], None],
    ) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout_seconds
        self.interval = min(1.0, timeout_seconds / 10)
        self.own = Pulse()
        self._last_words = last_words
        self._store = store
        self._lock = threading.Lock()  # of `own`, which both threads and the training change
        now = time.monotonic()
        self._seen: dict[int, tuple[Pulse, float]] = {r: (Pulse(), now) for r in range(world) if r != rank}
        self._store_answered = now
        self._stop, self._hurry, self._told = threading.Event(), threading.Event(), threading.Event()
        for work in (self._converse, self._watch):
            threading.Thread(target=work, name="watch", daemon=True).start()

    def tell(self, **facts: object) -> None:
        """Change what the next pulse says."""
        with self._lock:
            self.own = dataclasses.replace(self.own, **facts)  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        """Let the others know why this rank ends."""
        lost = isinstance(error, RankLostError)
        self.tell(failure=f"{type(error).__name__}: {' '.join(str(error).split())}", lost=lost)
        self._tell_now()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._hurry.set()

    def _tell_now(self) -> None:
        """Have the pulse told at once, but do not wait long for a store that may be gone."""
        self._told.clear()
        self._hurry.set()
        self._told.wait(2 * self.interval)

    def blame(self) -> RankLostError:
        """Return who must have made communication fail, after a look at everyone for a few beats."""
        deadline = time.monotonic() + (BEATS_MISSED + 2) * self.interval
        while time.monotonic() < deadline:
            if (found := self.lost(BEATS_MISSED * self.interval)) is not None:
                return found
            time.sleep(self.interval / 4)
        return self._laggard()

    def lost(self, silence: float) -> RankLostError | None:
        """Return the rank that failed or has shown no life for `silence` seconds; None when all are well."""
        now = time.monotonic()
        others = sorted(self._seen.items())
        for rank, (pulse, _) in others:
            if pulse.failure is not None and not pulse.lost:
                return RankLostError(rank, f"rank {rank} failed: {pulse.failure}")
        if now - self._store_answered > silence:
            return RankLostError(0, self._silent(0, now - self._store_answered))
        for rank, (pulse, when) in others:
            if now - when > silence and not pulse.lost:
                return RankLostError(rank, self._silent(rank, now - when))
        return None

    def _silent(self, rank: int, seconds: float) -> str:
        update = self._seen[rank][0].update if rank in self._seen else 0
        return (
            f"rank {rank} has shown no sign of life for {seconds:.0f} s, the last in update {update + 1}: it was "
            "killed or stopped, or its machine is gone; all ranks end. The run continues from its newest whole state"
        )

    def _laggard(self) -> RankLostError:
        """Name who is alive but not where all others are."""
        for rank, (pulse, _) in sorted(self._seen.items()):
            if pulse.lost and pulse.failure is not None:
                return RankLostError(rank, f"rank {rank} ended: {pulse.failure}")
        rank, (pulse, _) = min(self._seen.items(), key=lambda item: (item[1][0].update, item[1][0].talking))
        return RankLostError(
            rank,
            f"rank {rank} is alive but did not answer within runtime.timeout_seconds={self.timeout:g}; it stands in "
            f"update {pulse.update + 1}. All ranks end; raise the limit if it was busy",
        )

    def _watch(self) -> None:
        reported = 0.0
        while not self._stop.wait(self.interval):
            found = None if self.own.failure else self.lost(self.timeout)
            if found is None:
                reported = 0.0
            elif not reported:
                reported = time.monotonic()
            elif time.monotonic() - reported > PATIENCE_SECONDS:
                self._end(found)

    def _end(self, found: RankLostError) -> None:
        """End a process whose training thread waits for a rank that will not come."""
        self.fail(found)
        with contextlib.suppress(Exception):
            self._last_words(found)
        print(f"error: rank {self.rank}: {found}", file=sys.stderr, flush=True)
        os._exit(2)

    def _converse(self) -> None:
        while not self._stop.is_set():
            self._hurry.clear()
            with contextlib.suppress(Exception):  # a store that is gone shows in `_store_answered`
                self._beat()
                self._told.set()
                self._look()
                self._store_answered = time.monotonic()
            self._hurry.wait(self.interval)

    def _beat(self) -> None:
        self.tell(beat=self.own.beat + 1)
        self._store.set(f"pulse/{self.rank}", json.dumps(dataclasses.asdict(self.own)))

    def _look(self) -> None:
        for rank, (before, _) in list(self._seen.items()):
            if not self._store.check([f"pulse/{rank}"]):
                continue
            pulse = Pulse(**json.loads(self._store.get(f"pulse/{rank}")))
            if pulse != before:
                self._seen[rank] = (pulse, time.monotonic())
