"""Trained runs of every family, exported: transformers opens them, computes the same, and nothing is half done."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from foreign import transformers
from tokenizers import Tokenizer, processors
from trained_runs import RunOf

from tiny_llm.data.tokenizer import load
from tiny_llm.interop import exporting, verification
from tiny_llm.interop.exporting import Request, export, write_tokenizer
from tiny_llm.interop.pretrained import open_pretrained
from tiny_llm.interop.tensors import ExchangeError, read_tensors
from tiny_llm.interop.verification import VerificationError
from tiny_llm.training.sampling import continue_text
from tiny_llm.training.saved_run import open_run

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}


def request(run: Path, **changes: Any) -> Request:
    values = {
        "checkpoint": None,
        "worker": None,
        "to": "hf",
        "dtype": "fp32",
        "verify": True,
        "device": "cpu",
    }
    return Request(str(run), **(values | changes))


def opened(directory: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def validation_loss(theirs: Any, run: Path) -> float:
    """The loss on the whole validation split, computed by transformers alone."""
    saved = open_run(str(run), None, "cpu")
    tokens = torch.from_numpy(
        saved.cache.read("validation", 0, saved.cache.validation_tokens).astype("int64")
    )
    length, total = saved.config.model.context_length, 0.0
    for start in range(0, len(tokens) - 1, length):
        block = tokens[start : start + length + 1]
        logits = theirs(block[None, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum"))
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("family", CLASSES)
def test_a_trained_run_is_exported_verified_and_sampled(
    family: str, workers: int, run_of: RunOf, tmp_path: Path
) -> None:
    run, out = run_of(family, workers), tmp_path / "out"
    exported = export(request(run), out)
    assert "8 identical" in exported.lines[2]
    theirs = opened(out)
    assert type(theirs).__name__ == CLASSES[family]
    result = json.loads((run / "result.json").read_text())
    assert result["final_validation_loss"] < math.log(512) - 0.5, (
        "a model that learned nothing proves nothing"
    )
    assert validation_loss(theirs, run) == pytest.approx(result["final_validation_loss"], abs=1e-5)
    saved = open_run(str(run), None, "cpu")
    text = continue_text(saved.config, saved.weights, saved.cache, "import", max_new_tokens=8)
    assert text.startswith("import")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("import", return_tensors="pt")
    ours = continue_text(saved.config, saved.weights, saved.cache, "import", 8, temperature=0.0)
    theirs_said = theirs.generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    assert tokenizer.decode(theirs_said, skip_special_tokens=True) == ours


def test_the_files_are_those_that_other_programs_look_for(run_of: RunOf, tmp_path: Path) -> None:
    export(request(run_of("qwen3", 2)), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    result = json.loads((run_of("qwen3", 2) / "result.json").read_text())
    for words in (
        "Qwen3ForCausalLM, ",
        "the mean of 2 workers",
        f"**{result['final_validation_loss']:.4f}** nats",
        f"{result['final_validation_targets']:,} held-out targets",
        "| optimizer.lr |",
        "| corpus | text |",
        "64 held-out sequences",
    ):
        assert words in card, words


def test_zeros_stand_for_biases_that_only_the_class_has(run_of: RunOf, tmp_path: Path) -> None:
    export(
        request(run_of("gpt2", 1)), tmp_path / "out"
    )  # the preset has no biases of queries, keys and values
    tensors = read_tensors(tmp_path / "out")
    assert not tensors["transformer.h.0.attn.c_attn.bias"].any()
    assert tensors["transformer.h.0.attn.c_proj.bias"].any()
    assert "lm_head.weight" in tensors
    assert "attention.qkv.bias" in (tmp_path / "out" / "README.md").read_text()


def test_a_tied_head_is_stored_once(run_of: RunOf, tmp_path: Path) -> None:
    export(request(run_of("llama", 1)), tmp_path / "out")
    assert "lm_head.weight" not in read_tensors(tmp_path / "out")
    theirs = opened(tmp_path / "out")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


@pytest.mark.parametrize("to", ["hf", "flax"])
def test_workers_and_checkpoints_are_those_that_were_asked_for(
    to: str, run_of: RunOf, tmp_path: Path
) -> None:
    run = run_of("llama", 2)
    for name, changes in {
        "mean": {},
        "0": {"worker": 0},
        "1": {"worker": 1},
        "early": {"checkpoint": "epoch-002.safetensors"},
        "early-1": {"checkpoint": "epoch-002.safetensors", "worker": 1},
        "state-1": {"checkpoint": "epoch-002.pt", "worker": 1},
    }.items():
        export(request(run, to=to, verify=to == "flax", **changes), tmp_path / name)
    weights = {path.name: open_pretrained(path).weights for path in tmp_path.iterdir() if path.is_dir()}
    for key, mean in weights["mean"].items():
        assert torch.allclose(mean, (weights["0"][key] + weights["1"][key]) / 2, atol=1e-7)
        assert torch.equal(weights["early-1"][key], weights["state-1"][key])
    matrix = "layers.0.mlp.down.weight"
    pairs = [("0", "1"), ("mean", "0"), ("mean", "early"), ("early", "early-1")]
    assert not any(torch.equal(weights[one][matrix], weights[other][matrix]) for one, other in pairs)
    assert "worker 1 of 2, after 26 of 52 updates" in (tmp_path / "early-1" / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_says_how_many_continuations_stay(dtype: str, run_of: RunOf, tmp_path: Path) -> None:
    exported = export(request(run_of("gpt2", 2), dtype=dtype), tmp_path / "out")
    assert f"transformers in {dtype} against the trained weights in fp32" in exported.lines[2]
    theirs = opened(tmp_path / "out")
    assert theirs.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    weights = open_run(str(run_of("gpt2", 2)), None, "cpu").weights
    read = open_pretrained(tmp_path / "out").weights
    assert torch.equal(read["head.weight"], weights["head.weight"].to(theirs.dtype).float())


def swap_gate_and_up(tensors: dict[str, Any]) -> None:
    prefix = "model.layers.0.mlp."
    tensors[f"{prefix}gate_proj.weight"], tensors[f"{prefix}up_proj.weight"] = (
        tensors[f"{prefix}up_proj.weight"],
        tensors[f"{prefix}gate_proj.weight"],
    )


def scale_one_norm(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.02


def drop_a_tensor(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.0.self_attn.o_proj.weight"]


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (swap_gate_and_up, "logits differ by up to"),
        (scale_one_norm, "logits differ by up to"),
        (drop_a_tensor, "missing_keys"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_that_computes_something_else_is_not_kept(
    tamper: Any, words: str, dtype: str, run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = exporting.to_theirs

    def tampered(*arguments: Any) -> dict[str, Any]:
        tensors = translate(*arguments)
        tamper(tensors)
        return tensors

    monkeypatch.setattr(exporting, "to_theirs", tampered)
    with pytest.raises(VerificationError, match=words):
        export(request(run_of("llama", 1), dtype=dtype), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_tokenizer_that_gives_other_ids_is_not_kept(
    run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(content: bytes) -> bytes:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.post_processor = processors.TemplateProcessing(
            "<|endoftext|> $A", None, [("<|endoftext|>", 0)]
        )
        return str(tokenizer.to_str()).encode()

    monkeypatch.setattr(exporting, "_without_additions", other)
    with pytest.raises(VerificationError, match="AutoTokenizer gives other ids"):
        export(request(run_of("llama", 1)), tmp_path / "out")


def test_a_continuation_that_parts_is_found_at_its_token(run_of: RunOf) -> None:
    saved = open_run(str(run_of("llama", 1)), None, "cpu")
    decoder = verification._decoder(saved, saved.weights)
    prompts = torch.randint(512, (3, 4), generator=torch.Generator().manual_seed(0))
    tokens = prompts
    for _ in range(6):
        tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], 1)
    assert verification.part(decoder, prompts, tokens[:, 4:]) == ([], [])
    tokens[1, 4 + 5] = (tokens[1, 4 + 5] + 1) % 512
    tokens[2, 4 + 2] = (tokens[2, 4 + 2] + 1) % 512
    partings, margins = verification.part(decoder, prompts, tokens[:, 4:])
    assert partings == [5, 2]
    assert min(margins) > 1e-4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_continuations_decide_for_fp32_and_are_told_for_bf16(
    dtype: str, run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if transformers' cache were wrong: the logits of whole sequences agree, a continuation does not."""
    right = verification.continuations

    def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        prompts, new = right(*arguments)
        new[3, 6:] = (new[3, 6:] + 1) % 512
        return prompts, new

    monkeypatch.setattr(verification, "continuations", wrong)
    if dtype == "fp32":
        with pytest.raises(VerificationError, match="1 of 8 greedy continuations differ"):
            export(request(run_of("llama", 1)), tmp_path / "out")
    else:
        line = export(request(run_of("llama", 1), dtype=dtype), tmp_path / "out").lines[2]
        parted = int(line.split(" identical")[0].split()[-1])
        assert parted < 8
        assert "the others part after" in line


def test_a_tokenizer_of_the_hub_gives_the_ids_of_training(
    tiny_overrides: list[str], run_of: RunOf, tmp_path: Path
) -> None:
    """Its tokenizer.json adds a token in front, cuts and pads; training encoded the text alone."""
    cache = open_run(str(run_of("llama", 1)), None, "cpu").cache
    hub = tmp_path / "hub" / "tokenizer"
    hub.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(cache.directory / "tokenizer" / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(hub / "tokenizer.json"))
    fingerprint = hashlib.sha256((hub / "tokenizer.json").read_bytes()).hexdigest()
    manifest = cache.manifest | {"tokenizer": cache.manifest["tokenizer"] | {"fingerprint": fingerprint}}
    write_tokenizer(tmp_path, type(cache)(tmp_path / "hub", manifest), 32)
    text = "def main(self):\n    return 'näh'"
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert found == load(hub).encode(text, add_special_tokens=False).ids
    assert len(found) > 3


def test_an_export_that_fails_leaves_nothing_and_what_a_kill_left_is_cleared(
    run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.preparing").mkdir()
    (tmp_path / "out.preparing" / "model.safetensors").write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "model_card", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export(request(run_of("llama", 1), verify=False), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == []
    export(request(run_of("llama", 1), verify=False), tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ExchangeError, match="exists already"):
        export(request(run_of("gpt2", 1), verify=False), tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
