"""What a run shows while it trains: loss, tokens/s, time left and validation loss.

On a terminal one live line, with the validation results as permanent lines above it; elsewhere, and always in
run.log, one plain line a row. In flow the rows of metrics.jsonl and, after every update, a cheap `tick`. The
show never stops a training: a reader that went away (`| head`), a terminal that closed, a full disk under
run.log or a character that the encoding lacks is passed over in silence.
"""

from __future__ import annotations

import errno
import locale
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.text import Text

Row = Mapping[str, Any]

REDRAW_SECONDS = 0.25
SMALLEST_BAR, LARGEST_BAR = 4, 40


class Progress:
    """Shows one run; a context manager, since the live line must give the terminal back.

    The run starts after `start_update` of `total_updates` updates. `stream` is a text stream (None: stdout)
    or a rich Console; `log` gets the plain lines whatever the stream is.
    """

    def __init__(
        self,
        total_updates: int,
        total_tokens: int,
        start_update: int,
        stream: TextIO | Console | None = None,
        log: TextIO | None = None,
    ) -> None:
        self._total_updates = total_updates
        self._total_tokens = total_tokens
        self._update = start_update
        self._tokens = 0
        self._pace = Pace()
        self._next_look = 0.0
        self._row: Row = {}
        self._validation_loss: float | None = None
        self._screen = _screen(stream)
        self._log = None if log is None else PatientStream(log)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not isinstance(self._screen, PatientStream):
            from rich.live import Live

            # No refreshing thread: `tick` draws. What others print comes out above the line; a stream that
            # leads to a file keeps leading there.
            self._live = Live(
                console=self._screen,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tick(self, update: int, tokens: int) -> None:
        """Hear how many updates and tokens are done. For every update: it costs under a microsecond."""
        self._update, self._tokens = update, tokens
        now = monotonic()
        if now >= self._next_look:
            self._look(now)

    def train(self, row: Row) -> None:
        """Show a train row."""
        self._row = row
        self._update, self._tokens = row["update"], row["tokens"]
        self._look(monotonic())
        self._write_plain(self._train_line(row))

    def validation(self, row: Row) -> None:
        """Show a validation or final_validation row; its loss stays in view until the next one."""
        self._validation_loss = row["loss"]
        line = self._validation_line(row)
        self._write_plain(line)
        self._write_above(line, style="bold cyan")
        self._draw()

    def say(self, text: str) -> None:
        """Show a sentence of the run's story, above the live line."""
        self._write_plain(text)
        self._write_above(text)

    def close(self) -> None:
        """Leave the last state of the live line on the screen. A second call does nothing."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def _look(self, now: float) -> None:
        self._next_look = now + REDRAW_SECONDS
        self._pace.observe(now, self._update)
        self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            done = self._update / self._total_updates
            self._live.update(LiveLine(done, list(self._facts())), refresh=True)

    def _write_plain(self, line: str) -> None:
        for stream in (self._screen, self._log):
            if isinstance(stream, PatientStream):
                stream.write(line + "\n")
                stream.flush()

    def _write_above(self, line: str, style: str = "") -> None:
        if not isinstance(self._screen, PatientStream):
            from rich.text import Text

            # Text: a style given to print itself would colour the live line too.
            self._screen.print(Text(line, style), soft_wrap=True)

    def _train_line(self, row: Row) -> str:
        fields = [
            f"update {self._count(row['update'])}",
            f"loss {row['loss']:>7.4f}",
            f"validation {_loss(self._validation_loss, 4):>7}",
            f"{short_number(row['tokens_per_second']):>5} tokens/s",
            f"{clock(self._seconds_left()):>8} left",
            f"lr {row['lr']:.2e}",
            f"{short_number(row['tokens']):>5} tokens",
        ]
        if spread := _best_and_worst(row):
            fields += [
                f"workers {spread[0]:.4f} to {spread[1]:.4f}",
                f"consensus error {row['relative_consensus_error']:.1e}",
            ]
        return "  ".join(fields)

    def _validation_line(self, row: Row) -> str:
        name = row["event"].replace("_", " ")
        return (
            f"------ {self._count(row['update'])}  {name} loss {row['loss']:.4f}  epoch {row['epoch']:g}  "
            f"({short_number(row['targets'])} targets, {row['seconds']:.1f} s)"
        )

    def _facts(self) -> Iterator[Sequence[str]]:
        """Yield the facts of the live line, each in its forms from the longest to the shortest."""
        row = self._row
        spread = _best_and_worst(row)
        yield [self._count(self._update)]
        loss = row.get("loss")
        yield [*[f"loss {_loss(loss, 3)}"] * 3, f"loss {_loss(loss, 2)}"]
        if spread:
            best, worst = spread
            yield [
                f"best {best:.3f} worst {worst:.3f}",
                f"{best:.3f}..{worst:.3f}",
                f"{best:.2f}..{worst:.2f}",
            ]
        validation = _loss(self._validation_loss, 3)
        yield [f"validation {validation}", f"val {validation}"]
        speed = short_number(row["tokens_per_second"]) if row else "-"
        yield [f"{speed} tokens/s", f"{speed} tok/s", f"{speed}/s"]
        if spread:
            error = row["relative_consensus_error"]
            yield [f"consensus error {error:.1e}", f"consensus {error:.1e}", f"cons {error:.0e}"]
        left = clock(self._seconds_left())
        yield [f"{left} left", f"{left} left", left]

    def _count(self, update: int) -> str:
        total = str(self._total_updates)
        return f"{update:>{len(total)}}/{total}"

    def _seconds_left(self) -> float | None:
        """From the recent pace; before there is one, from the tokens/s of the last row."""
        if (seconds_an_update := self._pace.seconds_an_update) is not None:
            return (self._total_updates - self._update) * seconds_an_update
        if speed := self._row.get("tokens_per_second"):
            return (self._total_tokens - self._tokens) / float(speed)
        return None


class Pace:
    """Seconds an update in the recent past: about the last half minute, or the last tenth of a long run.

    Both sums fade exponentially, so pauses (validation, checkpoints) count with the share that they have. The
    clock starts at the first update seen: what came before it (compilation, warm caches) will not come again.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._last_update = 0
        self._seconds = 0.0
        self._updates = 0.0

    def observe(self, now: float, update: int) -> None:
        if self._first is None:
            self._first = now
        else:
            keep = math.exp(-(now - self._last) / (30 + (now - self._first) / 10))
            self._seconds = keep * self._seconds + now - self._last
            self._updates = keep * self._updates + update - self._last_update
        self._last, self._last_update = now, update

    @property
    def seconds_an_update(self) -> float | None:
        return self._seconds / self._updates if self._updates else None


class LiveLine:
    """A bar and the facts beside it, on one line of whatever width the terminal has now."""

    def __init__(self, done: float, facts: Sequence[Sequence[str]]) -> None:
        self._done = done
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        from rich.text import Text

        width = options.max_width
        facts = fit(self._facts, width - SMALLEST_BAR - 2)
        text = Text(no_wrap=True, overflow="crop", end="")
        if (room := width - len(facts) - 2) >= SMALLEST_BAR:
            bar_width = min(LARGEST_BAR, room)
            filled = int(bar_width * self._done)
            line, space = ("=", "-") if options.ascii_only else ("━", "─")
            text.append(line * filled, "green").append(space * (bar_width - filled) + "  ", "dim")
        text.append(facts)
        text.highlight_regex(r"\b[a-z][a-z/]+\b", "dim")
        yield text


def fit(facts: Sequence[Sequence[str]], width: int) -> str:
    """Join one form of each fact, shortening from the left, a step each, until it takes `width` at most."""
    level = [0] * len(facts)
    joined = "  ".join(forms[0] for forms in facts)
    for shorter in range(1, max(map(len, facts))):
        for index in range(len(facts)):
            if len(joined) <= width:
                return joined
            level[index] = min(shorter, len(facts[index]) - 1)
            joined = "  ".join(forms[chosen] for forms, chosen in zip(facts, level, strict=True))
    return joined


class PatientStream:
    """A text stream that swallows its own failures."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """What may be drawn. Under LC_ALL=C Python itself speaks UTF-8, but the terminal may not."""
        if locale.setlocale(locale.LC_CTYPE) in ("C", "POSIX"):
            return "ascii"
        return self._stream.encoding or "utf-8"  # a StringIO has none

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._pass_over(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._pass_over(error)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _pass_over(self, error: OSError | ValueError) -> None:
        """Lead a stream whose other end is gone to nowhere: Python's own flush at exit would fail on it."""
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            except OSError:
                return


def short_number(value: float) -> str:
    """Write a count or a rate with three digits: 950, 12.3k, 1.23M, 20.4B."""
    unit = ""
    for unit in ("", "k", "M", "B", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    if not unit and value == int(value):
        return str(int(value))
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{unit}"


def clock(seconds: float | None) -> str:
    """Write a duration: 0:07, 2:03, 1:02:03, 3d 1:02:03; None is -:--."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def _loss(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _best_and_worst(row: Row) -> tuple[float, float] | None:
    """Return the smallest and the largest local loss of a decentralized run's row."""
    local_losses = row.get("local_losses", ())
    return (min(local_losses), max(local_losses)) if len(local_losses) > 1 else None


def _screen(stream: TextIO | Console | None) -> Console | PatientStream:
    """Return a Console where a live line can be drawn, else the stream for plain lines."""
    from rich.console import Console

    console = stream if isinstance(stream, Console) else Console(file=stream)
    patient = PatientStream(cast(TextIO, console.file))
    # A stream's own word: FORCE_COLOR makes rich see a terminal in a file.
    terminal = console.is_terminal if isinstance(stream, Console) else patient.isatty()
    if not terminal or console.is_dumb_terminal:
        return patient
    console.file = cast(IO[str], patient)
    return console
