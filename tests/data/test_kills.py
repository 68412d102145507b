"""Whatever ends a preparation, there is either no cache or a whole one, and nothing runs on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_cache import files_of, random_documents, text_settings, write_documents

from tiny_llm.config.errors import UserError
from tiny_llm.data import publication
from tiny_llm.data.encoding import Batch, EncodingError, WorkerPool
from tiny_llm.data.prepare import ensure_cache, prepare
from tiny_llm.data.publication import BusyError, beside, locked, staged
from tiny_llm.data.tokenizer import train_bpe

PROGRAM = Path(__file__).with_name("preparing.py")
DOCUMENTS = 1500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "a.txt", random_documents(DOCUMENTS))


def start(cache: Path, corpus: Path, workers: int = 2, *more: str) -> subprocess.Popen[str]:
    """Start a preparation and return when it begins."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(cache), str(corpus), str(workers), *more],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "preparing\n"
    return process


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return the state of a process (Z: ended, not yet collected) and the process that started it."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return state, int(parent)


def children(pid: int) -> list[int]:
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in found if state_and_parent(child)[1] == pid]


def wait_for_children(pid: int, count: int) -> list[int]:
    deadline = time.monotonic() + 20
    while len(found := children(pid)) < count:
        assert time.monotonic() < deadline, "no tokenizer processes were started"
        time.sleep(0.01)
    return found


def are_gone(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if state_and_parent(pid)[0] != "Z"]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


def test_kill_9_at_twenty_moments_changes_not_one_byte(tmp_path: Path, corpus: Path) -> None:
    undisturbed = tmp_path / "undisturbed/cache"
    process = start(undisturbed, corpus)
    started = time.monotonic()
    assert process.wait() == 0
    seconds = time.monotonic() - started
    generator = random.Random(0)
    cache = tmp_path / "disturbed/cache"
    expected, seen = files_of(undisturbed), set()
    for _ in range(20):
        process = start(cache, corpus)
        time.sleep(generator.uniform(0, seconds))
        process.kill()
        process.wait()
        seen |= {path.name for path in cache.parent.iterdir()}
        if cache.exists():
            assert files_of(cache) == expected
            for path in sorted(cache.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            cache.rmdir()
    assert "cache.preparing" in seen, "no kill came in the middle of a preparation"
    assert start(cache, corpus).wait() == 0
    assert files_of(cache) == expected
    assert sorted(path.name for path in cache.parent.iterdir()) == ["cache"]


def test_tokenizer_processes_do_not_outlive_a_killed_parent(tmp_path: Path, corpus: Path) -> None:
    process = start(tmp_path / "cache", corpus, 3)
    workers = wait_for_children(process.pid, 3)
    process.kill()
    process.wait()
    assert are_gone(workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_cancels_drains_and_leaves_nothing(tmp_path: Path, corpus: Path, workers: int) -> None:
    process = start(tmp_path / "cache", corpus, workers)
    started = wait_for_children(process.pid, 2) if workers == 2 else []
    assert process.stdout is not None
    while "training" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.02)  # well inside a preparation that a quiet machine finishes in 0.2 s
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert are_gone(started)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_tokenizer_processes_ignore_an_interrupt(tmp_path: Path, corpus: Path) -> None:
    process = start(tmp_path / "cache", corpus, 2)
    for pid in wait_for_children(process.pid, 2):
        deadline = time.monotonic() + 10
        while not ignores_interrupts(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(pid, signal.SIGINT)
    assert process.wait(60) == 0


def ignores_interrupts(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    return True


def test_a_tokenizer_process_that_dies_is_reported(tmp_path: Path) -> None:
    facts = train_bpe(random_documents(20), 300, tmp_path)
    with WorkerPool(tmp_path, facts.eos_id, 2) as pool:
        assert len(pool.submit(Batch(["a text"], ["train"])).result().tokens) > 1
        for worker in pool.workers:
            worker.process.kill()
        with pytest.raises(EncodingError, match=r"status -9 \(out of memory\?\).*data\.prepare_workers"):
            pool.submit(Batch(["a text"], ["train"])).result()


def test_a_failure_in_a_tokenizer_process_is_reported(tmp_path: Path) -> None:
    facts = train_bpe(random_documents(20), 300, tmp_path)
    with (
        WorkerPool(tmp_path, facts.eos_id, 2) as pool,
        pytest.raises(EncodingError, match="a tokenizer process failed: TypeError"),
    ):
        pool.submit(Batch([3], ["train"])).result()  # type: ignore[list-item]


def test_a_kill_between_the_two_renames_leaves_the_old_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    beside(cache, "replaced").mkdir()
    (beside(cache, "replaced") / "old").write_text("old")
    beside(cache, "preparing").mkdir()
    with locked(cache, waiting=None):
        assert files_of(cache) == {"old": b"old"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cache.lock"]


def test_a_kill_after_both_renames_leaves_the_new_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("cache", "cache.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with locked(cache, waiting=None):
        assert files_of(cache) == {"file": b"cache"}
        assert not beside(cache, "replaced").exists()


@pytest.mark.parametrize("step", range(6))
def test_a_replacement_that_fails_at_any_step_leaves_one_of_the_two(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new name and each flush is a step; the exception stands for a kill, which cleans nothing."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "file").write_text("old")
    left = step

    class Killed(BaseException):
        pass

    def counted(call: object) -> object:
        def stepped(*arguments: object, **named: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return call(*arguments, **named)  # type: ignore[operator]

        return stepped

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(publication, "flush", counted(publication.flush))
        patch.setattr(publication.shutil, "rmtree", counted(lambda *_, **__: None))
        with contextlib.suppress(Killed), staged(cache) as staging:
            (staging / "file").write_text("new")
    with locked(cache, waiting=None):
        assert files_of(cache)["file"] in (b"old", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_who_waited_for_a_lock_holds_one_that_others_see(tmp_path: Path) -> None:
    directory, waits, entered, done = tmp_path / "cache", *(threading.Event() for _ in range(3))

    def wait_and_hold() -> None:
        with locked(directory, waiting=lambda _: waits.set()):
            entered.set()
            done.wait(60)

    waiter = threading.Thread(target=wait_and_hold)
    with locked(directory, waiting=None):
        waiter.start()
        assert waits.wait(60)
    assert entered.wait(60), "the first holder has removed the file that the second had opened"
    with pytest.raises(BusyError), locked(directory, waiting=None):
        pass
    done.set()
    waiter.join()
    assert not list(tmp_path.iterdir())


def test_two_preparations_are_kept_apart(tmp_path: Path, corpus: Path) -> None:
    data = text_settings(tmp_path, corpus)
    lines: list[str] = []
    with locked(Path(data.cache_dir), waiting=None):
        with pytest.raises(BusyError, match=f"process {os.getpid()}"):
            prepare(data, 0, lines.append)
        waiting = threading.Thread(target=ensure_cache, args=(data, 0, lines.append))
        waiting.start()
        deadline = time.monotonic() + 10
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting" in lines[0]
        assert not Path(data.cache_dir).exists()
    waiting.join()
    assert Path(data.cache_dir).exists()


def test_two_trainings_that_find_no_cache_prepare_it_once(tmp_path: Path, corpus: Path) -> None:
    processes = [start(tmp_path / "cache", corpus, 1) for _ in range(2)]
    shown = [process.stdout.read() for process in processes if process.stdout]
    assert [process.wait() for process in processes] == [0, 0]
    assert shown[0].split()[-1] == shown[1].split()[-1]
    assert sum("training a byte-level BPE" in text for text in shown) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    small_disk: Path, corpus: Path, workers: int
) -> None:
    data = text_settings(small_disk, corpus, prepare_workers=workers)
    with pytest.raises(UserError, match=r"no space left on the disk.*data\.cache_dir=DIRECTORY") as refused:
        ensure_cache(data, 0, lambda line: None)
    assert "\n" not in str(refused.value)
    assert [path.name for path in small_disk.iterdir()] == []
