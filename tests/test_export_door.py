"""The export door: what it prints, and the exit code that a script can rely on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tiny_llm import export as door
from tiny_llm import sample
from tiny_llm.config.compose import compose
from tiny_llm.interop import exporting
from tiny_llm.interop.tensors import read_tensors

Answer = tuple[str, str, object]


@pytest.fixture(scope="module")
def run(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_llm.train import train

    path = tmp_path_factory.mktemp("export") / "run"
    packed = ["decentralized=atc", "decentralized.num_models=2", "topology=complete"]
    train(compose([*tiny_overrides, *packed, "training.tokens_per_parameter=0.5", f"output_dir={path}"]))
    return path


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    def ask(*words: str) -> Answer:
        """Return what the door prints on stdout and stderr, and its exit code."""
        monkeypatch.setattr(sys, "argv", ["export", *words])
        capsys.readouterr()
        code: object = 0
        try:
            door.main()
        except SystemExit as exit_:
            code = exit_.code
        return (*capsys.readouterr(), code)

    return ask


def test_a_flax_export_is_read_back(run: Path, tmp_path: Path, answer: object) -> None:
    printed, error, code = answer(f"run={run}", "to=flax", f"out={tmp_path / 'out'}")  # type: ignore[operator]
    assert (error, code) == ("", 0)
    assert "flat flax state, 26,720 parameters in 8 tensors, fp32" in printed
    assert "read back: 8 arrays equal to the last bit" in printed
    assert "layers.0.mlp.gate_up.kernel" in read_tensors(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model"]["width"] == 32


def test_an_export_without_verification_needs_no_transformers(
    run: Path, tmp_path: Path, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = [f"run={run}", f"out={tmp_path / 'out'}", "dtype=bf16"]
    printed, error, code = answer(*words)  # type: ignore[operator]
    assert (printed, code) == ("", 2)
    assert "verify=true compares with transformers, which is not installed" in error
    printed, error, code = answer(*words, "verify=false", "worker=1")  # type: ignore[operator]
    assert (error, code) == ("", 0)
    assert "LlamaForCausalLM, 26,720 parameters in 11 tensors, bf16" in printed
    assert "worker 1 of 2" in (tmp_path / "out" / "README.md").read_text()
    assert "Not verified" in (tmp_path / "out" / "README.md").read_text()


def test_a_verified_export_ends_with_0_and_one_that_differs_with_1(
    run: Path, tmp_path: Path, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'tiny-llm[hf]'")
    printed, error, code = answer(f"run={run}", f"out={tmp_path / 'good'}")  # type: ignore[operator]
    assert (error, code) == ("", 0)
    assert "8 identical" in printed
    theirs = exporting.to_theirs
    monkeypatch.setattr(
        exporting, "to_theirs", lambda *a: {key: value * 1.01 for key, value in theirs(*a).items()}
    )
    printed, error, code = answer(f"run={run}", f"out={tmp_path / 'bad'}")  # type: ignore[operator]
    assert (printed, code) == ("", 1)
    assert "the export differs from what was trained and is not kept: logits differ by up to" in error
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out={out}"], "run is missing"),
        (["run={run}"], "out is missing"),
        (["run={run}", "out={run}"], "exists already"),
        (["run=nowhere", "out={out}", "verify=false"], "nowhere/resolved.yaml does not exist"),
        (["run={run}", "out={out}", "to=onnx"], "to=onnx: expected hf | flax"),
        (["run={run}", "out={out}", "dtype=fp8"], "dtype=fp8: expected fp32 | fp16 | bf16"),
        (
            ["run={run}", "out={out}", "verify=false", "worker=2"],
            "worker=2: the run has 2 workers; allowed: 0 to 1",
        ),
        (
            ["run={run}", "out={out}", "verify=false", "checkpoint=no.pt"],
            "no.pt does not exist",
        ),
        (["run={run}", "out={out}", "verfy=false"], "did you mean 'verify'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_leaves_nothing(
    words: list[str], message: str, run: Path, tmp_path: Path, answer: object
) -> None:
    out = tmp_path / "out"
    printed, error, code = answer(*(word.format(run=run, out=out) for word in words))  # type: ignore[operator]
    assert (printed, error.count("\n"), code) == ("", 1, 2)
    assert message in error
    assert not out.exists()


def test_an_export_is_sampled_as_its_run_is(
    run: Path,
    tmp_path: Path,
    answer: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(f"run={run}", f"out={tmp_path / 'out'}", "verify=false")  # type: ignore[operator]
    texts = []
    for source in (f"run={run}", f"init_from={tmp_path / 'out'}"):
        monkeypatch.setattr(sys, "argv", ["sample", source, "prompt=def ", "max_new_tokens=20", "seed=3"])
        capsys.readouterr()
        sample.main()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("def \n")
