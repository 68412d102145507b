"""Presets of all families, their counts, and the switches that do not go together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiny_llm.config.compose import compose, conf_directory, config_groups
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.memory import sequence_bytes
from tiny_llm.config.parameters import parameter_counts, parameter_specs
from tiny_llm.config.parse import keys_of
from tiny_llm.config.plan import make_plan
from tiny_llm.config.saved import NOT_THE_RECIPE, flatten, plain, read_yaml, recipe_identity, to_yaml
from tiny_llm.config.schema import ModelConfig

TIED, QKV = "model.tied=true", "model.qkv_bias=true"


@pytest.mark.parametrize(
    ("overrides", "total"),
    [
        (["model=gpt2-small"], 163_009_536),
        (["model=gpt2-small", TIED], 124_412_160),
        (["model=gpt2-small", TIED, QKV], 124_439_808),
        (["model=gpt2-small", QKV], 163_037_184),
        (["model=gpt2-small", "model.output_bias=false"], 163_000_320),
        (["model=gpt2-medium"], 354_823_168),
        (["model=gpt2-8x512"], 76_933_120),
        (["model=qwen3-v0"], 3_257_824),
        (["model=qwen3-v1"], 34_125_056),
        (["model=qwen3-v2"], 66_919_296),
        (["model=qwen3-v3"], 118_589_952),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(overrides: list[str], total: int) -> None:
    summary = make_plan(compose([*overrides, "training.micro_batch_size=1"]).config()).summary()
    assert summary["parameters"] == total
    places = [summary[f"{place}_parameters"] for place in ("embedding", "head", "core")]
    assert sum(places) == total
    assert summary["non_embedding_parameters"] == total - places[0]
    assert (places[1] == 0) == compose(overrides).config().model.tied


@pytest.mark.parametrize(("version", "core"), list(enumerate([41_376, 8_393_472, 28_321_920, 67_126_784])))
def test_qwen3_has_its_core(version: int, core: int) -> None:
    model = compose([f"model=qwen3-v{version}"]).config().model
    counts = parameter_counts(model)
    assert counts.core == core
    assert counts.embedding == counts.head == model.vocab_size * model.width


def test_the_core_does_not_depend_on_the_vocabulary_and_positions_embed() -> None:
    small, large = (compose(["model=gpt2-small", f"data={data}"]).config().model for data in ("stdlib", "c4"))
    assert parameter_counts(small).core == parameter_counts(large).core
    assert parameter_counts(small).embedding == (4096 + 1024) * 768


def test_the_vocabulary_follows_the_corpus_and_the_corpus_is_one_override_away() -> None:
    for words, name, vocabulary in (
        (["model=gpt2-small"], "fineweb", 50257),
        (["model=qwen3-v0", "data=stdlib"], "stdlib", 4096),
        (["data=c4", "model=qwen3-v0"], "c4", 32000),
        (["experiment=quickstart", "model=gpt2-8x512"], "stdlib", 4096),
        (["model=20m"], "c4", 32000),
    ):
        config = compose(words).config()
        assert (config.data.name, config.model.vocab_size) == (name, vocabulary), words


def test_every_preset_sets_every_key_and_says_what_it_is() -> None:
    for name in config_groups()["model"]:
        lines = (conf_directory() / "model" / f"{name}.yaml").read_text().splitlines()
        settings = [
            line for line in lines if line and line[0] not in "# " and not line.startswith("defaults")
        ]
        assert sorted(line.partition(":")[0] for line in settings) == sorted(keys_of(ModelConfig)), name
        assert all("#" in line for line in settings), name
        stated = int(lines[0].partition(", ")[2].partition(" parameters")[0].replace(",", ""))
        vocabulary = int(lines[0].partition("vocabulary ")[2].partition(" ")[0])
        model = replace(compose([f"model={name}"]).config().model, vocab_size=vocabulary)
        assert parameter_counts(model).total == stated, name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.heads=6"],
            "model.heads=6: expected a divisor of model.width=320 .* nearest is 5.*model.head_dim",
        ),
        (["model.head_dim=7"], "model.head_dim=7: expected an even number.*nearest is 8"),
        (["model.width=15", "model.heads=5"], "model.heads=5: .* even head dimension"),
        (["model.kv_heads=2"], "model.kv_heads=2: expected a divisor of model.heads=5: 1, 5"),
        (["model.kv_heads=10"], "model.kv_heads=10: expected a divisor"),
        (["model.dropout=1"], "model.dropout=1: expected a number >= 0 and < 1"),
        (["model.dropout=-0.1"], "model.dropout=-0.1"),
        (["model.norm=batchnorm"], "model.norm=batchnorm: expected rmsnorm | layernorm"),
        (["model.mlp=relu"], "swiglu | gelu"),
        (["model.positions=alibi"], "rope | learned"),
        (["model.tied=maybe"], "true or false"),
        (["model.head_dim=0"], "an integer >= 1 or null"),
        (
            ["model=gpt2-small", "model.rope_theta=5"],
            "model.rope_theta would be ignored with model.positions=learned",
        ),
        (["model.kv_head=1"], "did you mean 'model.kv_heads'"),
        (["training.updates=5", "training.tokens_per_parameter=1"], "exclude each other"),
        (["training.epoch_updates=5", "training.epoch_tokens_per_parameter=1"], "exclude each other"),
        (["training.tokens_per_parameter=null"], "tokens_per_parameter=null: set it, or training.updates"),
        (["training.updates=0"], "an integer >= 1 or null"),
        (
            ["experiment=qwen3-v2-tinystories", "training.tokens_per_parameter=3"],
            "updates=4500 and .*exclude",
        ),
        (
            ["data=stdlib", "data.validation_tokens=9", "data.held_out_share=0.1"],
            "held_out_share would be ignored",
        ),
        (["data=c4", "data.validation_tokens=9"], "unknown key"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        make_plan(compose(overrides).config())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.head_dim=6", "model.heads=7"],
        ["model=gpt2-small", "model.heads=256"],
        ["model=gpt2-small", "model.head_dim=5", "model.kv_heads=3"],
        ["model=gpt2-small", "model.positions=rope", "model.rope_theta=5"],
        [
            "model.norm=layernorm",
            "model.mlp=gelu",
            "model.qk_norm=true",
            "model.tied=false",
            "model.dropout=0.1",
        ],
    ],
)
def test_any_switch_may_be_set_on_any_preset(overrides: list[str]) -> None:
    config = compose([*overrides, "training.micro_batch_size=1"]).config()
    assert make_plan(config).parameters == sum(spec.numel for spec in parameter_specs(config.model))


LLAMA = ["model=tiny", "data=stdlib", "output_dir=run"]
OLDER = {"vocab_size", "layers", "width", "heads", "ffn_width", "context_length", "rope_theta", "norm_eps"}
YOUNGER = {
    "model": sorted(set(keys_of(ModelConfig)) - OLDER - {"init_std"}),
    "training": ["updates", "epoch_updates"],
    "evaluation": ["prompts"],
    "data": ["validation_tokens"],
}


def older_values() -> dict[str, Any]:
    """What was saved of a config before the families."""
    values = plain(compose(LLAMA).config())
    del values["init_from"]
    for section, keys in YOUNGER.items():
        for key in keys:
            del values[section][key]
    return values


def test_a_config_saved_before_the_families_reads_as_the_llama_that_it_was(tmp_path: Path) -> None:
    assert len(YOUNGER["model"]) == 11
    (tmp_path / "resolved.yaml").write_text(json.dumps(older_values()))
    assert read_yaml(tmp_path / "resolved.yaml") == compose(LLAMA).config()


def test_a_recipe_from_before_the_families_keeps_its_identity() -> None:
    flat = {key: value for key, value in flatten(older_values()).items() if key not in NOT_THE_RECIPE}
    expected = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    assert recipe_identity(compose(LLAMA).config()) == expected


def test_younger_keys_at_their_defaults_leave_the_identity() -> None:
    config = compose(LLAMA).config()
    for section, changes in (
        ("model", {"tied": False}),
        ("model", {"dropout": 0.1}),
        ("model", {"kv_heads": 1}),
        ("training", {"updates": 7}),
        ("data", {"validation_tokens": 7}),
    ):
        changed = replace(config, **{section: replace(getattr(config, section), **changes)})  # type: ignore[arg-type]
        assert recipe_identity(changed) != recipe_identity(config), changes
    prompts = replace(config, evaluation=replace(config.evaluation, prompts=("a",)))
    assert recipe_identity(prompts) == recipe_identity(config)


def boundaries(*overrides: str) -> tuple[int, ...]:
    return make_plan(compose(["training.micro_batch_size=1", *overrides]).config()).epoch_boundaries


def test_a_budget_in_updates_keeps_the_epochs_and_ends_where_it_says() -> None:
    reference = boundaries()
    assert boundaries("training.updates=3113") == reference
    for updates in (1, 77, 78, 79, 155, 156, 200, 3112):
        expected = [boundary for boundary in reference if boundary < updates] + [updates]
        assert list(boundaries(f"training.updates={updates}")) == expected
    assert boundaries("training.updates=10", "training.epoch_updates=4") == (4, 8, 10)
    assert boundaries("training.updates=8", "training.epoch_updates=4") == (4, 8)
    assert boundaries("training.updates=3", "training.epoch_updates=4") == (3,)
    assert boundaries("training.epoch_updates=1000") == (1000, 2000, 3000, 3113)
    assert boundaries("training.updates=5", "training.epoch_tokens_per_parameter=0.0065") == (1, 2, 3, 4, 5)


def test_a_budget_in_updates_is_saved_as_such(tmp_path: Path) -> None:
    config = compose(["training.updates=100", "training.epoch_updates=10"]).config()
    assert config.training.tokens_per_parameter is None
    assert config.training.epoch_tokens_per_parameter is None
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert read_yaml(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("experiment", "updates", "tokens", "warmup", "lr", "last"),
    [
        ("gpt2-small-chinchilla", 33_165, 3_260_252_160, 1658, 1.4e-3, 1.4e-4),
        ("gpt2-small-chinchilla-two-passes", 66_330, 6_520_504_320, 3317, 1.4e-3, 1.4e-4),
        ("gpt2-small-chinchilla-twice-the-tokens", 66_330, 6_520_504_320, 3317, 1.4e-3, 1.4e-4),
        ("qwen3-v2-tinystories", 4500, 4500 * 32 * 256, 225, 6e-4, 6e-5),
    ],
)
def test_experiments_have_their_budgets_and_rates(
    experiment: str, updates: int, tokens: int, warmup: int, lr: float, last: float
) -> None:
    plan = make_plan(compose([f"experiment={experiment}", "training.micro_batch_size=1"]).config())
    assert (plan.updates, plan.tokens) == (updates, tokens)
    assert plan.lr(warmup - 1) == pytest.approx(lr, rel=1e-12)
    assert max(plan.lr(update) for update in range(0, updates, 97)) <= lr
    assert plan.lr(updates - 1) == pytest.approx(last, rel=1e-12)
    assert plan.config.model.dropout == 0
    assert len(plan.epoch_boundaries) >= 20
    fits_once = plan.config.data.max_passes == 1
    assert (plan.cache_tokens_needed > plan.tokens) == fits_once


def test_the_memory_estimate_knows_groups_and_written_attention_weights() -> None:
    config = compose(["model=gpt2-small", "runtime.precision=fp32", "runtime.device=cpu"]).config()

    def of(**changes: object) -> int:
        return sequence_bytes(replace(config, model=replace(config.model, **changes)))  # type: ignore[arg-type]

    assert of(kv_heads=1) < of()
    assert of(dropout=0.1) - of() == 12 * 12 * 1024 * (2 * 1024 * 9 - 576 * 4), "all, not the causal half"
    assert of(context_length=1025) < of(), "a CPU makes the weights of long sequences twice"
    assert of(mlp="swiglu") > of()
