"""`init_from`: training, evaluation and sampling begin from weights that another program or an export holds."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1])])
from foreign import saved, tokens
from reference.small import small_config, small_plan
from trained_runs import FAMILIES, RunOf

from tiny_llm.config.compose import compose
from tiny_llm.config.errors import UserError
from tiny_llm.interop.exporting import Request, export
from tiny_llm.interop.families import family_of
from tiny_llm.interop.pretrained import open_pretrained
from tiny_llm.interop.translation import hf_pieces, to_ours
from tiny_llm.train import train
from tiny_llm.training.engine import Engine
from tiny_llm.training.saved_run import open_run, open_weights


@pytest.mark.parametrize("name", ["llama", "llama-tied-with-biases", "qwen3", "gpt2", "gpt2-untied"])
def test_an_update_from_imported_weights_is_that_of_transformers_and_adamw(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path).double()
    pretrained = open_pretrained(tmp_path)
    config = small_config(optimizer={"grad_clip": None, "weight_decay": 0.1})
    plan = small_plan(replace(config, model=pretrained.model), rows=3)
    engine = Engine(plan, torch.device("cpu"))
    engine.model.set_all(pretrained.weights)
    inputs, targets = tokens()
    result = engine.update(0, lambda: (inputs, targets))

    loss = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in theirs.parameters()])
    settings = plan.config.optimizer
    decayed = [parameter for parameter in theirs.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        plan.lr(0),
        (settings.beta1, settings.beta2),
        settings.eps,
    ).step()
    assert result.losses[0] == pytest.approx(loss.item(), abs=1e-6)
    assert result.norms[0] == pytest.approx(norm.item(), abs=1e-4)
    family = family_of(pretrained.model)
    expected = to_ours(
        hf_pieces(family, pretrained.model), pretrained.model, dict(theirs.named_parameters()), "updated"
    )
    for key, value in engine.model.local_state_dict(0).items():
        # AdamW's first step is the sign of a gradient: where that is nearly 0, the fp32 of Llama's norms shows.
        assert (value - expected[key]).abs().max() < 1e-4, key
        assert (value - pretrained.weights[key]).abs().max() > 0.8 * plan.lr(0), f"{key} did not move"


def exported(run: Path, out: Path, to: str = "hf") -> Path:
    export(Request(str(run), None, None, to, "fp32", False, "cpu"), out)  # type: ignore[arg-type]
    return out


def overrides_of(tiny_overrides: list[str], family: str, *more: str) -> list[str]:
    return [*(text for text in tiny_overrides if text != "model=tiny"), *FAMILIES[family], *more]


@pytest.mark.parametrize(
    ("family", "to"), [("llama", "hf"), ("qwen3", "hf"), ("gpt2", "hf"), ("gpt2", "flax")]
)
def test_training_starts_from_an_export_of_any_family(
    family: str, to: str, tiny_overrides: list[str], run_of: RunOf, tmp_path: Path
) -> None:
    """With a learning rate of 0 two workers end as the model they started from, and its loss is theirs."""
    out = exported(run_of(family, 1), tmp_path / "out", to)
    run = tmp_path / "run"
    more = ["decentralized=atc", "decentralized.num_models=2", "topology=complete", "optimizer.lr=0"]
    budget = ["training.tokens_per_parameter=0.25"]
    train(
        compose(overrides_of(tiny_overrides, family, *more, *budget, f"init_from={out}", f"output_dir={run}"))
    )
    first, second = (json.loads((path / "result.json").read_text()) for path in (run_of(family, 1), run))
    assert second["final_validation_loss"] == pytest.approx(first["final_validation_loss"], abs=1e-6)
    start = json.loads((run / "environment.json").read_text())["starts"][0]
    initial = open_pretrained(out, open_run(str(run), None, "cpu").config.model)
    assert start["identities"]["initial_weights"] == initial.identity()
    for worker in (0, 1):
        weights = open_run(str(run), None, "cpu", worker).weights
        assert all(torch.equal(weights[key], value) for key, value in initial.weights.items())


def test_a_resumed_run_goes_on_from_its_checkpoint_not_from_the_directory(
    tiny_overrides: list[str], run_of: RunOf, tmp_path: Path
) -> None:
    out = exported(run_of("llama", 1), tmp_path / "out")
    settings = [f"init_from={out}", "training.checkpoint_policy=interval"]
    train(compose(overrides_of(tiny_overrides, "llama", *settings, f"output_dir={tmp_path / 'run'}")))
    shutil.rmtree(out)
    train(compose([f"resume={tmp_path / 'run' / 'epoch-002.pt'}", f"output_dir={tmp_path / 'again'}"]))
    weights, again = (open_run(str(tmp_path / name), None, "cpu").weights for name in ("run", "again"))
    assert all(torch.equal(weights[key], value) for key, value in again.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.ffn_width=72", r"model.ffn_width=72 \(there 64\)"),
        ("init_from=nowhere", "nowhere holds no config.json"),
    ],
)
def test_weights_that_do_not_fit_stop_a_run_before_its_directory_exists(
    change: str, words: str, tiny_overrides: list[str], run_of: RunOf, tmp_path: Path
) -> None:
    out = exported(run_of("llama", 1), tmp_path / "out")
    more = [f"init_from={out}", change] if "init_from" not in change else [change]
    with pytest.raises(UserError, match=words):
        train(compose(overrides_of(tiny_overrides, "llama", *more, f"output_dir={tmp_path / 'run'}")))
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(tiny_overrides: list[str], run_of: RunOf, tmp_path: Path) -> None:
    out = exported(run_of("llama", 1), tmp_path / "out")
    text = (out / "tokenizer.json").read_text()
    values = json.loads(text)
    vocabulary = values["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (out / "tokenizer.json").write_text(json.dumps(values))
    more = [f"init_from={out}", f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(
        UserError, match=r"another tokenizer than that of the corpus: 2 tokens have other ids"
    ):
        train(compose(overrides_of(tiny_overrides, "llama", *more)))
    assert not (tmp_path / "run").exists()


def test_weights_are_evaluated_on_a_run_or_on_a_token_cache(run_of: RunOf, tmp_path: Path) -> None:
    from tiny_llm.training.evaluation import Evaluator

    run, other = run_of("qwen3", 1), run_of("qwen3", 2)
    out = exported(other, tmp_path / "out")
    cache = str(open_run(str(run), None, "cpu").cache.directory)
    expected = json.loads((other / "result.json").read_text())["final_validation_loss"]
    for where in ({"run": str(run), "cache": None}, {"run": None, "cache": cache}):
        opened = open_weights(str(out), device="cpu", **where)  # type: ignore[arg-type]
        evaluation = Evaluator(opened.config, opened.cache, opened.device).full(opened.weights)
        assert evaluation.loss == pytest.approx(expected, abs=1e-6)
    with pytest.raises(UserError, match=r"give run=DIR or cache=DIR"):
        open_weights(str(out), None, None, "cpu")
    with pytest.raises(UserError, match="is no token cache"):
        open_weights(str(out), None, str(tmp_path), "cpu")
