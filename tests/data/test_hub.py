"""Hub corpora, read by the real clients from a Hub on this machine that breaks as told."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hub_server import HubServer, Repository
from pyarrow import parquet
from small_cache import SETTINGS, random_documents, text_settings, write_documents

from tiny_llm.data import tokenizer as tok
from tiny_llm.data.corpora import is_held_out

PROGRAM = Path(__file__).with_name("hub_preparing.py")
DOCUMENTS = random_documents(1500)
HELD_OUT, TRAINING = DOCUMENTS[:100], DOCUMENTS[100:]
C4_PAGE = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/c4-train.*.json.gz}
  - {split: validation, path: en/c4-validation.*.json.gz}
---
"""


def json_gz(texts: list[str]) -> bytes:
    return gzip.compress("".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts).encode())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    directory = tmp_path_factory.mktemp("tokenizer")
    tok.train_bpe(DOCUMENTS[:50], 400, directory)
    return Repository(
        "models", "my/tokenizer", "b" * 40, {"tokenizer.json": (directory / "tokenizer.json").read_bytes()}
    )


@pytest.fixture(scope="module")
def c4() -> Repository:
    files = {"README.md": C4_PAGE.encode(), "en/c4-validation.00000.json.gz": json_gz(HELD_OUT)}
    for shard in range(4):
        files[f"en/c4-train.{shard:05d}.json.gz"] = json_gz(TRAINING[shard * 350 : (shard + 1) * 350])
    return Repository("datasets", "allenai/c4", "a" * 40, files)


def c4_settings(directory: Path, **changes: Any) -> dict[str, Any]:
    own = {
        "name": "c4", "cache_dir": str(directory / "cache"), "dataset": "allenai/c4", "subset": "en",
        "revision": "main", "train_split": "train", "validation_split": "validation", "text_field": "text",
        "tokenizer": "my/tokenizer", "tokenizer_revision": "main", "attempts": 3, "shuffle_buffer": 1,
    }  # fmt: skip
    return SETTINGS | own | changes


def run(
    endpoint: str, settings: dict[str, Any], tokens: int, directory: Path
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(directory / "home")}
    command = [sys.executable, str(PROGRAM), json.dumps(settings), str(tokens)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def texts_of(cache: Path, split: str) -> list[str]:
    content = b"".join(path.read_bytes() for path in sorted(cache.glob(f"{split}-*.bin")))
    ids = [int.from_bytes(content[i : i + 2], "little") for i in range(0, len(content), 2)]
    return tok.load(cache / "tokenizer").decode(ids, skip_special_tokens=False).split(tok.EOS)[:-1]


def test_broken_connections_lose_and_repeat_nothing(
    tmp_path: Path, c4: Repository, tokenizer: Repository
) -> None:
    """One answer is cut in its middle; later the Hub is away for longer than its own client is patient."""
    seen: list[str] = []

    def count(path: str) -> int:
        seen.append(path)
        return seen.count(path)

    with HubServer(c4, tokenizer) as hub:
        hub.cut = lambda path: "00001" in path and count(path) == 1
        hub.away = lambda path: "00003" in path and count(path) < 10
        done = run(hub.endpoint, c4_settings(tmp_path), 10**9, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 2 of 3" in done.stdout
    assert len(seen) > 11
    assert texts_of(tmp_path / "cache", "validation") == HELD_OUT
    assert sorted(texts_of(tmp_path / "cache", "train")) == sorted(TRAINING)
    manifest = json.loads((tmp_path / "cache/manifest.json").read_text())
    assert manifest["corpus"]["revision"] == "a" * 40
    assert manifest["tokenizer"]["revision"] == "b" * 40
    assert manifest["exhausted"]
    assert [line for line in hub.requests if "/main" in line] == [
        "GET /api/datasets/allenai/c4/revision/main",
        "GET /api/models/my/tokenizer/revision/main",
    ]


def test_an_outage_for_good_says_what_failed_and_how_to_go_on(
    tmp_path: Path, c4: Repository, tokenizer: Repository
) -> None:
    with HubServer(c4, tokenizer) as hub:
        hub.away = lambda path: "00002" in path
        done = run(hub.endpoint, c4_settings(tmp_path), 10**9, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert "cannot read the dataset allenai/c4 of the Hugging Face Hub after 3 attempts" in last
    assert "python -m tiny_llm.prepare data=c4" in last
    assert "data=text data.paths=" in last
    assert "experiment=quickstart" in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_hub_out_of_reach_is_told_in_one_line(tmp_path: Path) -> None:
    done = run("http://127.0.0.1:9", c4_settings(tmp_path), 1, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "after 3 attempts: ConnectError" in done.stdout.splitlines()[-1]
    assert done.stderr == ""


def test_what_does_not_exist_is_not_asked_for_twice(
    tmp_path: Path, c4: Repository, tokenizer: Repository
) -> None:
    with HubServer(c4, tokenizer) as hub:
        done = run(hub.endpoint, c4_settings(tmp_path, dataset="allenai/c5"), 1, tmp_path)
        assert (
            "cannot read the dataset allenai/c5 of the Hugging Face Hub: RepositoryNotFoundError"
            in done.stdout
        )
        assert "attempt " not in done.stdout
        done = run(hub.endpoint, c4_settings(tmp_path, subset="nl"), 1, tmp_path)
        assert "BuilderConfig 'nl' not found. Available: ['en']" in done.stdout
        assert "attempt " not in done.stdout
        done = run(hub.endpoint, c4_settings(tmp_path, text_field="body"), 1, tmp_path)
        assert "split validation: no field 'body'; set data.text_field to one of text, url" in done.stdout


def test_parquet_is_held_out_by_content_and_read_no_further_than_needed(
    tmp_path: Path, tokenizer: Repository
) -> None:
    files = {"README.md": b"---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n"}
    for shard in range(3):
        page = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": TRAINING[shard * 400 : (shard + 1) * 400]}), page)
        files[f"sample/10BT/{shard:03d}.parquet"] = page.getvalue()
    settings = c4_settings(
        tmp_path,
        name="fineweb",
        dataset="big/web",
        subset="sample-10BT",
        validation_split=None,
        shard_tokens=1000,
    )
    with HubServer(Repository("datasets", "big/web", "c" * 40, files), tokenizer) as hub:
        done = run(hub.endpoint, settings, 3000, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any("002.parquet" in line for line in hub.requests if line.startswith("GET"))
    manifest = json.loads((tmp_path / "cache/manifest.json").read_text())
    assert manifest["splits"]["train"]["tokens"] == 4001
    assert not manifest["exhausted"]
    held_out = texts_of(tmp_path / "cache", "validation")
    assert held_out == [text for text in TRAINING if is_held_out(text, 0.2)][: len(held_out)]
    assert not any(is_held_out(text, 0.2) for text in texts_of(tmp_path / "cache", "train"))


def test_own_files_without_the_hub_can_train_a_tokenizer(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "a.txt", DOCUMENTS[:100])
    settings = vars(text_settings(tmp_path, corpus, tokenizer="my/tokenizer"))
    done = run("http://127.0.0.1:9", settings, 0, tmp_path)
    assert "cannot read the tokenizer my/tokenizer" in done.stdout
    assert done.stdout.strip().endswith("data.tokenizer=bpe trains one on your files")


def test_own_files_can_use_a_tokenizer_of_the_hub(tmp_path: Path, tokenizer: Repository) -> None:
    corpus = write_documents(tmp_path / "a.txt", DOCUMENTS[:100])
    settings = vars(text_settings(tmp_path, corpus, tokenizer="my/tokenizer"))
    with HubServer(tokenizer) as hub:
        done = run(hub.endpoint, settings, 0, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "cache/manifest.json").read_text())["tokenizer"]["revision"] == "b" * 40
