"""The registry: models are kept whole, and compared only by what was measured in the same way."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_llm import registry as door
from tiny_llm.analysis.registry_tables import comparison_text
from tiny_llm.config.compose import compose
from tiny_llm.config.errors import UserError
from tiny_llm.interop.comparison import evaluated, one_protocol, recorded
from tiny_llm.interop.entries import Entry, entries, open_entry
from tiny_llm.interop.held_out import HeldOut, read_held_out
from tiny_llm.interop.opened import open_model
from tiny_llm.interop.tensors import ExchangeError
from tiny_llm.models.decoder import Decoder

Answer = tuple[str, str, object]
Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def registry(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models: two of one token cache (of different sizes), one of another tokenizer and context."""
    from tiny_llm.interop.entries import add
    from tiny_llm.interop.exporting import Request
    from tiny_llm.train import train

    root = tmp_path_factory.mktemp("registry")
    other = ["data.vocab_size=300", f"data.cache_dir={root}/cache-300", "model.context_length=64"]
    for name, more in {
        "small": [],
        "wide": ["model.width=48", "decentralized=awc", "decentralized.num_models=2"],
        "bytes": other,
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            if name != "wide":  # a picture takes as long as a run
                patch.setattr("tiny_llm.training.loop.plot_run", lambda *_: None)
            train(compose([*tiny_overrides, *more, f"output_dir={root}/{name}"]))
        request = Request(f"{root}/{name}", None, None, "hf", "fp32", False, "cpu")
        add(root / "registry", name, request, f"the goal of {name}")
    return root / "registry"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    def answer(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["registry", *words])
        capsys.readouterr()
        code: object = 0
        try:
            door.main()
        except SystemExit as exit_:
            code = exit_.code
        return (*capsys.readouterr(), code)

    return answer


@pytest.fixture(scope="module")
def cache(tiny_overrides: list[str]) -> str:
    return compose(tiny_overrides).config().data.cache_dir


def test_an_entry_holds_the_export_and_all_that_is_known(registry: Path) -> None:
    entry = open_entry(registry, "wide")
    assert {path.name for path in entry.directory.iterdir()} == {
        "RUN.md",
        "entry.json",
        "environment.json",
        "loss.png",
        "metrics.jsonl",
        "model",
        "resolved.yaml",
        "result.json",
    }
    assert open_model(entry.model, "cpu").model.width == 48
    result = json.loads((entry.directory / "result.json").read_text())
    assert entry.facts.training_loss == result["final_validation_loss"]
    assert (entry.facts.workers, entry.facts.parameters) == (2, result["parameters"])
    page = (entry.directory / "RUN.md").read_text()
    for heading in ("Goal", "Data", "Architecture", "Hyper-parameters", "Curve", "Results", "Samples"):
        assert f"## {heading}\n" in page
    assert "the goal of wide" in page
    assert f"**{result['final_validation_loss']:.4f}** nats" in page
    assert "| optimizer.lr | 0.008 |" in page
    assert "⟶" in page


def test_an_entry_is_whole_or_absent(
    registry: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = registry.parent / "small"
    words = [f"run={run}", "name=new", f"registry={tmp_path / 'r'}", "verify=false"]
    with monkeypatch.context() as patch:
        patch.setattr("tiny_llm.interop.entries.run_page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask("add", *words)
    assert [path.name for path in (tmp_path / "r").iterdir()] == []
    assert entries(tmp_path / "r") == []
    assert ask("add", *words, "to=flax")[2] == 0
    assert [entry.name for entry in entries(tmp_path / "r")] == ["new"]
    flax, hf = (open_model(root / "model", "cpu") for root in (tmp_path / "r" / "new", registry / "small"))
    assert all(torch.equal(flax.weights[name], value) for name, value in hf.weights.items())
    printed, error, code = ask("add", *words)
    assert (printed, code) == ("", 2)
    assert "exists already; choose another name" in error


@torch.no_grad()
def slow_nats(entry: Entry, held_out: HeldOut, block: int) -> tuple[float, int]:
    """The summed cross-entropy in nats, one target at a time from whole logits, and the targets."""
    opened = open_model(entry.model, "cpu")
    decoder = Decoder(opened.model)
    decoder.load_state_dict(dict(opened.weights))
    stream = [opened.eos_id]
    for text in held_out.documents:
        stream += [*opened.tokenizer.encode(text, add_special_tokens=False).ids, opened.eos_id]
    nats = 0.0
    for start in range(0, len(stream) - 1, block):
        piece = stream[start : start + block + 1]
        log_softmax = torch.log_softmax(decoder(torch.tensor([piece[:-1]]))[0].double(), -1)
        nats -= sum(float(log_softmax[i, token]) for i, token in enumerate(piece[1:]))
    return nats, len(stream) - 1


def test_bits_per_byte_are_those_of_the_definition(registry: Path, cache: str, ask: Ask) -> None:
    words = ("names=[small,bytes,wide]", f"data={cache}", f"registry={registry}", "format=json")
    printed, error, code = ask("compare", *words, "most_bytes=8000", "device=cpu")
    assert (error, code) == ("", 0)
    found = json.loads(printed)
    held_out = read_held_out(cache, 8000)
    assert f"{held_out.bytes:,} bytes" in found["protocol"]
    assert held_out.sha256[:12] in found["protocol"]
    assert "blocks of 32 tokens" in found["protocol"]
    models = {one["name"]: one for one in found["models"]}
    assert len(models) == 3
    for name, one in models.items():
        nats, targets = slow_nats(open_entry(registry, name), held_out, 32)
        assert one["targets"] == targets
        assert one["loss"] == pytest.approx(nats / targets, rel=1e-5)
        assert one["bits_per_byte"] == pytest.approx(nats / math.log(2) / held_out.bytes, rel=1e-5)
    bits = [one["bits_per_byte"] for one in found["models"]]
    assert bits == sorted(bits)
    # The tokenizer of 300 entries needs more tokens for the same bytes: its loss a token says nothing.
    assert models["bytes"]["targets"] > models["small"]["targets"]
    assert models["bytes"]["loss"] < models["small"]["loss"]


def test_a_tokenizer_that_drops_text_is_told(registry: Path) -> None:
    row = replace(recorded(open_entry(registry, "small")), altered_documents=1)
    assert "small: its tokenizer does not give 1 of the documents back" in comparison_text(
        one_protocol([row], ()), "table"
    )


def test_a_training_time_loss_never_stands_beside_a_re_evaluated_one(registry: Path, cache: str) -> None:
    small, wide = (open_entry(registry, name) for name in ("small", "wide"))
    anew = evaluated(wide, read_held_out(cache, 4000), 32, (), "cpu")
    with pytest.raises(
        ExchangeError, match=r"measured in different ways .*small: measured by each run while training"
    ):
        one_protocol([recorded(small), anew], ())
    assert one_protocol([anew], ()).models == (anew,)


def test_recorded_losses_compare_within_one_split_and_context_alone(registry: Path, ask: Ask) -> None:
    printed, _, code = ask("compare", "names=[small,wide]", f"registry={registry}", "format=json")
    found = json.loads(printed)
    assert code == 0
    assert "measured by each run while training" in found["protocol"]
    for one in found["models"]:
        assert one["loss"] == open_entry(registry, one["name"]).facts.training_loss
        assert one["bits_per_byte"] is None
    printed, error, code = ask("compare", "names=[small,bytes]", f"registry={registry}")
    assert (printed, code) == ("", 2)
    assert "these losses do not compare" in error
    assert "give data=..." in error


@pytest.mark.parametrize(
    "change", [{"training_loss_over": "a subset"}, {"precision": "bf16"}, {"data_identity": "0" * 64}]
)
def test_recorded_losses_of_another_subset_precision_or_cache_do_not_compare(
    change: dict[str, str], registry: Path
) -> None:
    small, wide = (open_entry(registry, name) for name in ("small", "wide"))
    assert len(one_protocol([recorded(small), recorded(wide)], ()).models) == 2
    other = replace(wide, facts=replace(wide.facts, **change))  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match="these losses do not compare"):
        one_protocol([recorded(small), recorded(other)], ())


def test_a_damaged_entry_is_named(registry: Path, tmp_path: Path) -> None:
    page = json.loads((registry / "small" / "entry.json").read_text())
    del page["parameters"]
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "entry.json").write_text(json.dumps(page))
    with pytest.raises(UserError, match=r"small/entry.json.parameters is missing"):
        entries(tmp_path)


def test_a_worker_whose_loss_nobody_measured_is_refused(registry: Path) -> None:
    entry = open_entry(registry, "wide")
    alone = replace(entry, facts=replace(entry.facts, worker=1))
    with pytest.raises(ExchangeError, match="wide: its run measured no loss of these weights"):
        recorded(alone)


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_tables_say_how_they_were_measured_and_show_continuations_side_by_side(
    form: str, registry: Path, cache: str, ask: Ask
) -> None:
    words = [f"data={cache}", f"registry={registry}", "most_bytes=4000", f"format={form}"]
    printed, _, code = ask("compare", "names=[small,wide]", "prompts=['import, and', \"def\"]", *words)
    assert code == 0
    assert "evaluated anew" in printed
    for words_there in (
        "bits per byte",
        "loss per token",
        "core",
        "training tokens/s",
        'prompt: "import, and"',
    ):
        assert words_there in printed
    prompts = printed.split("prompt: ")[1:]
    assert len(prompts) == 2
    assert all("small" in part and "wide" in part for part in prompts)
    if form == "markdown":
        assert "| :-- | --: |" in printed


def test_continuations_are_the_greedy_ones_of_transformers(registry: Path, cache: str) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install 'tiny-llm[hf]'"
    )
    entry = open_entry(registry, "small")
    found = evaluated(entry, read_held_out(cache, 100), 32, ("import",), "cpu").continuations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(entry.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(entry.model)
    ids = tokenizer("import", return_tensors="pt")
    room = 32 - ids["input_ids"].shape[1]  # of the model's context
    said = tokenizer.decode(
        model.generate(**ids, max_new_tokens=room, do_sample=False)[0], skip_special_tokens=True
    )
    assert len(said) > len("import")
    assert f"import{found}".startswith(said)


def test_the_list_and_a_page_are_shown_in_every_form(registry: Path, ask: Ask) -> None:
    for form in ("table", "markdown", "json"):
        printed, _, code = ask("list", f"registry={registry}", f"format={form}")
        assert code == 0
        assert all(name in printed for name in ("small", "wide", "bytes", "the goal of small"))
    assert [one["name"] for one in json.loads(printed)] == ["bytes", "small", "wide"]
    assert ask("show", "name=small", f"registry={registry}")[0].startswith("# small\n")
    assert json.loads(ask("show", "name=small", f"registry={registry}", "format=json")[0])["name"] == "small"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ad", "name=x"], "'ad': expected add | list | compare | show; did you mean 'add'?"),
        (["show", "name=smal"], "has no model named smal; did you mean 'small'?"),
        (["show", "name=../wide"], "has no model named ../wide"),
        (["show"], "name is missing"),
        (["add", "run=x", "name=a/b"], "name=a/b: use letters, digits"),
        (["compare", "names=[]"], "names=[]: name at least one model"),
        (["compare", "names=small"], "names=small: expected a list"),
        (["compare", "names=[small,small]"], "a model stands there twice"),
        (["compare", "names=[small]", "data=nowhere/*.txt"], "names no file"),
        (["compare", "names=[small]", "prompts=[a]"], "prompts would be ignored without data="),
        (["list", "format=html"], "format=html: expected table | markdown | json"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], message: str, registry: Path, ask: Ask) -> None:
    printed, error, code = ask(*words, f"registry={registry}")
    assert (printed, error.count("\n"), code) == ("", 1, 2)
    assert message in error


def test_without_words_the_door_says_what_it_can(ask: Ask) -> None:
    printed, error, code = ask()
    assert (error, code) == ("", 0)
    assert "add|list|compare|show" in printed
