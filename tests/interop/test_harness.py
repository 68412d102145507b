"""The lm-evaluation-harness reads an export: a local task, no network, and the numbers are ours."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from trained_runs import RunOf

from tiny_llm.interop.exporting import Request, export
from tiny_llm.interop.opened import open_model
from tiny_llm.models.decoder import Decoder

DOCUMENTS = [
    {"start": "def main(", "end": "self):"},
    {"start": "import", "end": " json"},
    {"start": "    return", "end": " None"},
]
TASK = """
task: tiny_local
dataset_path: json
dataset_kwargs:
  data_files: {path}
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{end}}}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
  - metric: acc
"""


def test_the_harness_gives_the_perplexity_that_we_compute(
    run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'tiny-llm[eval]'")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    out = tmp_path / "out"
    export(Request(str(run_of("qwen3", 2)), None, None, "hf", "fp32", False, "cpu"), out)
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps(one) for one in DOCUMENTS) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny_local.yaml").write_text(TASK.format(path=tmp_path / "documents.jsonl"))
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(out), device="cpu", dtype="float32", batch_size=2),
        tasks=["tiny_local"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None
    perplexity = found["results"]["tiny_local"]["perplexity,none"]
    assert perplexity == pytest.approx(expected_perplexity(out), rel=1e-4)


@torch.no_grad()
def expected_perplexity(out: Path) -> float:
    """exp of the mean over documents of minus the log-likelihood of the end after the start."""
    opened = open_model(out, "cpu")
    decoder = Decoder(opened.model)
    decoder.load_state_dict(dict(opened.weights))
    total = 0.0
    for one in DOCUMENTS:
        start = opened.tokenizer.encode(one["start"], add_special_tokens=False).ids
        whole = opened.tokenizer.encode(one["start"] + one["end"], add_special_tokens=False).ids
        log_softmax = torch.log_softmax(decoder(torch.tensor([whole[:-1]]))[0], -1)
        total += sum(float(log_softmax[i - 1, whole[i]]) for i in range(len(start), len(whole)))
    return math.exp(-total / len(DOCUMENTS))
