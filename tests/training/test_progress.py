"""What is visible while a run trains: four facts, on one line, whatever the stream is and does."""

from __future__ import annotations

import errno
import io
import locale
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiny_llm.training import progress
from tiny_llm.training.progress import LiveLine, Progress, clock, fit, short_number

TOTAL_UPDATES, BATCH_TOKENS = 2000, 1000
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(progress, "monotonic", moved)
    return moved


def train_row(update: int, loss: float = 3.25, workers: int = 1) -> dict[str, Any]:
    row = {"event": "train", "update": update, "epoch": 1.5, "tokens": update * BATCH_TOKENS, "loss": loss}
    row |= {"lr": 0.003, "grad_norm": 0.5, "tokens_per_second": 12345.6, "seconds": 1.0, "data_seconds": 0.1}
    if workers > 1:
        row |= {"local_losses": [loss + 0.5 * i for i in range(workers)], "relative_consensus_error": 0.0123}
    return row


def validation_row(update: int, loss: float = 3.5, event: str = "validation") -> dict[str, Any]:
    row = {"event": event, "update": update, "epoch": 3, "tokens": update * BATCH_TOKENS, "loss": loss}
    return row | {"seconds": 2.34, "targets": 262144}


def start(stream: Any, log: io.StringIO | None = None) -> Progress:
    return Progress(TOTAL_UPDATES, TOTAL_UPDATES * BATCH_TOKENS, 0, stream, log)


def screens(terminal: io.StringIO) -> list[str]:
    """Every state of every line that the terminal showed."""
    return re.split(r"[\r\n]+", ESCAPE.sub("", terminal.getvalue()))


def test_a_train_line_has_the_loss_the_speed_the_time_left_and_the_validation_loss(ticking: Clock) -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        shown.validation(validation_row(10))
        shown.tick(10, 10 * BATCH_TOKENS)
        ticking.now += 20
        shown.tick(20, 20 * BATCH_TOKENS)
        shown.train(train_row(20))
    line = stream.getvalue().splitlines()[-1]
    for fact in (
        "20/2000",
        "loss  3.2500",
        "12.3k tokens/s",
        "1:06:00 left",
        "validation  3.5000",
        "20.0k tokens",
    ):
        assert fact in line


def test_train_lines_align_whatever_the_numbers(ticking: Clock) -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        shown.train(train_row(1, loss=10.3987))
        shown.validation(validation_row(900))
        shown.train(train_row(1900) | {"tokens_per_second": 7.0})
    first, _, last = stream.getvalue().splitlines()
    for word in ("loss", "validation", "tokens/s", "left", "lr"):
        assert first.index(word) == last.index(word)


def test_a_validation_line_is_told_apart_at_a_glance() -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        shown.validation(validation_row(40))
        shown.validation(validation_row(2000, event="final_validation"))
    assert stream.getvalue().splitlines() == [
        "------   40/2000  validation loss 3.5000  epoch 3  (262k targets, 2.3 s)",
        "------ 2000/2000  final validation loss 3.5000  epoch 3  (262k targets, 2.3 s)",
    ]


def test_a_decentralized_line_adds_the_best_and_the_worst_worker_and_the_consensus_error() -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        shown.train(train_row(5, workers=4))
        shown.train(train_row(6, workers=1))
    decentralized, synchronous = stream.getvalue().splitlines()
    assert decentralized.endswith("workers 3.2500 to 4.7500  consensus error 1.2e-02")
    assert "workers" not in synchronous


def test_time_left_follows_the_recent_pace_not_the_average_since_the_start(ticking: Clock) -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        for update in range(1, 1001):
            ticking.now += 10.0 if update <= 100 else 1.0
            shown.tick(update, update * BATCH_TOKENS)
        shown.train(train_row(1000))
    minutes, seconds = re.search(r"(\d+):(\d\d) left", stream.getvalue()).groups()  # type: ignore[union-attr]
    assert 1000 <= int(minutes) * 60 + int(seconds) < 1100


def test_the_first_update_does_not_count_for_the_pace_since_compiling_happens_once(ticking: Clock) -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        ticking.now += 600
        shown.tick(1, BATCH_TOKENS)
        ticking.now += 1
        shown.tick(2, 2 * BATCH_TOKENS)
        shown.train(train_row(2))
    assert "33:18 left" in stream.getvalue()


def test_before_there_is_a_pace_the_time_left_comes_from_the_rows_speed(ticking: Clock) -> None:
    stream = io.StringIO()
    with start(stream) as shown:
        shown.train(train_row(1) | {"tokens_per_second": 1999.0})
    assert "16:40 left" in stream.getvalue()


def test_a_resumed_run_counts_only_its_own_updates_in_the_pace(ticking: Clock) -> None:
    stream = io.StringIO()
    with Progress(TOTAL_UPDATES, TOTAL_UPDATES * BATCH_TOKENS, 1000, stream) as shown:
        shown.tick(1001, 1001 * BATCH_TOKENS)
        ticking.now += 9
        shown.tick(1010, 1010 * BATCH_TOKENS)
        shown.train(train_row(1010))
    assert "16:30 left" in stream.getvalue()


def test_a_terminal_gets_one_live_line_and_keeps_the_validation_results(ticking: Clock) -> None:
    terminal, log = Terminal(), io.StringIO()
    with start(terminal, log) as shown:
        shown.say("2,000 updates on cpu")
        for update in (1, 2):
            shown.train(train_row(update))
        shown.validation(validation_row(2))
        shown.tick(3, 3 * BATCH_TOKENS)
    lines = [line.strip() for line in screens(terminal)]
    assert "2,000 updates on cpu" in lines
    assert "------    2/2000  validation loss 3.5000  epoch 3  (262k targets, 2.3 s)" in lines
    assert not any(line.startswith("update") for line in lines)
    assert re.search(r"3/2000  loss 3\.250  val\w* 3\.500  12\.3k tok\w*/s .*left$", lines[-2])


def test_what_stands_above_the_live_line_is_neither_markup_nor_its_style(ticking: Clock) -> None:
    terminal = Terminal()
    with start(terminal) as shown:
        shown.say("layers [bold] :smile: [1, 2]")
        shown.validation(validation_row(2))
    assert "layers [bold] :smile: [1, 2]" in [line.strip() for line in screens(terminal)]
    live_lines = [line for line in re.split(r"[\r\n]+", terminal.getvalue()) if "left" in line]
    assert live_lines
    assert not any("36m" in line for line in live_lines)


def test_run_log_gets_the_plain_lines_in_both_modes(ticking: Clock) -> None:
    logs = []
    for stream in (Terminal(), io.StringIO()):
        logs.append(log := io.StringIO())
        with start(stream, log) as shown:
            shown.say("hello")
            shown.train(train_row(1, workers=2))
            shown.validation(validation_row(1))
    assert logs[0].getvalue() == logs[1].getvalue()
    assert len(logs[0].getvalue().splitlines()) == 3


def test_the_live_line_is_redrawn_four_times_a_second_at_most(ticking: Clock) -> None:
    terminal = Terminal()
    with start(terminal) as shown:
        shown.tick(1, 1)
        before = len(screens(terminal))
        for update in range(2, 1002):
            ticking.now += 0.001
            shown.tick(update, update)
        assert len(screens(terminal)) - before <= 4


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("workers", [1, 8])
def test_the_live_line_fits_the_terminal_with_every_fact_on_it(
    ticking: Clock, monkeypatch: pytest.MonkeyPatch, width: int, workers: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    with Progress(31130, 31130 * BATCH_TOKENS, 0, terminal) as shown:
        shown.validation(validation_row(12345, loss=10.3456))
        shown.tick(12345, 12345 * BATCH_TOKENS)
        ticking.now += 1000
        shown.tick(12845, 12845 * BATCH_TOKENS)
        shown.train(train_row(12845, loss=10.4, workers=workers) | {"tokens_per_second": 1.234e6})
    lines = screens(terminal)
    assert max(map(len, lines)) <= width
    facts = ["12845/31130", "loss 10.40", "val", " 10.346", "1.23M", "10:09:30"]
    facts += ["13.90", "cons"] if workers > 1 else []
    for fact in facts:
        assert fact in lines[-2]


def test_facts_are_shortened_no_more_than_the_width_asks() -> None:
    facts = [["update"], ["loss 3.250", "3.250"], ["validation 3.5", "val 3.5", "3.5"]]
    assert fit(facts, 99) == "update  loss 3.250  validation 3.5"
    assert fit(facts, 34) == "update  loss 3.250  validation 3.5"
    assert fit(facts, 33) == "update  3.250  validation 3.5"
    assert fit(facts, 22) == "update  3.250  val 3.5"
    assert fit(facts, 5) == "update  3.250  3.5"


def test_a_narrow_terminal_crops_the_line_instead_of_wrapping_it() -> None:
    console = Console(file=io.StringIO(), width=20, force_terminal=True)
    with console.capture() as capture:
        console.print(LiveLine(0.5, [["1234/2000"], ["loss 3.250"], ["validation 3.500"]]), end="")
    assert len(ESCAPE.sub("", capture.get())) == 20


@pytest.mark.parametrize(("codec", "ctype"), [("ascii", "C.UTF-8"), ("utf-8", "C"), ("latin-1", "C.UTF-8")])
def test_a_terminal_that_is_not_utf8_gets_ascii(
    monkeypatch: pytest.MonkeyPatch, codec: str, ctype: str
) -> None:
    class OldTerminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(locale, "setlocale", lambda *_: ctype)
    pixels = io.BytesIO()
    with start(OldTerminal(pixels, encoding=codec)) as shown:
        shown.train(train_row(1000))
        shown.validation(validation_row(1000))
        shown.say("ok")
        seen = pixels.getvalue()
    assert seen.isascii()
    assert b"=====" in seen


def test_a_character_that_the_encoding_lacks_becomes_a_question_mark() -> None:
    raw = io.BytesIO()
    with start(io.TextIOWrapper(raw, encoding="ascii")) as shown:
        shown.say("naïve → text")
        assert raw.getvalue() == b"na?ve ? text\n"


class Failing(io.StringIO):
    """A stream on which everything fails, as on a full disk or on a terminal that has closed."""

    def __init__(self, number: int, terminal: bool) -> None:
        super().__init__()
        self.number, self.terminal, self.attempts = number, terminal, 0

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.attempts += 1
        raise OSError(self.number, "failed")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_failing_stream_or_log_never_stops_the_training(number: int, terminal: bool) -> None:
    stream, log = Failing(number, terminal), Failing(errno.ENOSPC, False)
    with start(stream, log) as shown:
        shown.say("hello")
        shown.train(train_row(1))
        shown.validation(validation_row(1))
    assert stream.attempts >= 3
    assert log.attempts == 3


def test_a_closed_stream_never_stops_the_training() -> None:
    stream, log = io.StringIO(), io.StringIO()
    with start(stream, log) as shown:
        stream.close()
        shown.train(train_row(1))
    assert log.getvalue().startswith("update")


def test_a_reader_that_goes_away_costs_neither_the_log_nor_the_exit_code(tmp_path: Path) -> None:
    script = f"""
import sys
from tests_row import row
from tiny_llm.training.progress import Progress
with open({str(tmp_path / "run.log")!r}, "w") as log, Progress(5000, 5000, 0, log=log) as shown:
    for update in range(1, 5001):  # more than a pipe holds
        shown.train(row | {{"update": update}})
print("the sample")
"""
    (tmp_path / "tests_row.py").write_text(f"row = {train_row(1)!r}")
    (tmp_path / "script.py").write_text(script)
    child = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    errors = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), errors) == (0, b"")
    assert len((tmp_path / "run.log").read_text().splitlines()) == 5000


def test_a_file_gets_plain_lines_even_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with start(stream) as shown:
        shown.train(train_row(1))
    assert stream.getvalue().startswith("update")
    assert "\x1b" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with start(terminal) as shown:
        shown.train(train_row(1))
    assert terminal.getvalue().startswith("update")


def test_a_rich_console_can_take_the_place_of_the_stream() -> None:
    screen = io.StringIO()
    with start(Console(file=screen, force_terminal=True, width=80)) as shown:
        shown.train(train_row(7))
    assert any("7/2000  loss 3.250" in line for line in screens(screen))


def test_the_terminal_is_given_back_when_the_training_fails() -> None:
    terminal = Terminal()

    def fail() -> Iterator[None]:
        with start(terminal) as shown:
            shown.train(train_row(1))
            raise RuntimeError("loss is not finite")

    with pytest.raises(RuntimeError):
        fail()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert terminal.getvalue().rindex(show) > terminal.getvalue().rindex(hide)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (7, "7"), (7.25, "7.25"), (999, "999"), (999.7, "1.00k"), (1000, "1.00k"), (12345, "12.3k"),
        (99_960, "100k"), (999_499, "999k"), (999_500, "1.00M"), (1_230_000, "1.23M"), (20_403_520, "20.4M"),
        (5.25e9, "5.25B"), (1.5e16, "15000T"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_digits(value: float, written: str) -> None:
    assert short_number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (None, "-:--"), (0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (123, "2:03"), (3723, "1:02:03"),
        (3 * 86400 + 3723, "3d 1:02:03"),
    ],
)  # fmt: skip
def test_durations_read_like_a_clock(seconds: float | None, written: str) -> None:
    assert clock(seconds) == written
