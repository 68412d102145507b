"""The Plan: budgets in exact arithmetic, rates and gamma at known points."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from tiny_llm.config.compose import compose
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.parameters import count_parameters
from tiny_llm.config.plan import make_plan
from tiny_llm.config.rates import lr_factor
from tiny_llm.config.schema import (
    AdaptiveConsensusConfig,
    Config,
    ConstantSchedule,
    CosineSchedule,
    WsdSchedule,
)


@pytest.fixture(scope="module")
def reference() -> Config:
    return compose([]).config()


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("20m", 20_403_520),
        ("50m", 48_507_392),
        ("90m", 91_605_120),
        ("250m", 251_943_360),
        ("500m", 516_814_080),
    ],
)
def test_presets_have_their_parameter_counts(preset: str, parameters: int) -> None:
    assert count_parameters(compose([f"model={preset}"]).config().model) == parameters


def test_the_reference_run_has_its_budget(reference: Config) -> None:
    plan = make_plan(reference)
    assert (plan.updates, plan.tokens, len(plan.epoch_boundaries)) == (3113, 408_027_136, 40)
    assert plan.cache_tokens_needed == 7 * 2 * 33_554_432 + 1


@pytest.mark.parametrize(
    ("passes", "context", "updates"),
    [(2, 384, 349_525), (1, 384, 174_762), (3, 511, 197_000), (2, 512, 262_144)],
)
def test_a_cache_of_the_needed_size_lasts_though_every_pass_reads_whole_sequences(
    passes: int, context: int, updates: int
) -> None:
    changes = [f"data.max_passes={passes}", f"model.context_length={context}", f"training.updates={updates}"]
    small = [f"training.batch_tokens={context}", "training.tokens_per_parameter=null"]
    plan = make_plan(compose(["data=c4", *changes, *small]).config())
    group = plan.config.data.shuffle_group_size * plan.config.data.shard_tokens
    whole, rest = divmod(plan.cache_tokens_needed - 1, group)
    assert rest == 0

    def lasts(cache_tokens: int) -> bool:
        return (cache_tokens - 1) // context * context * passes >= plan.tokens

    assert lasts(whole * group + 1)
    assert not lasts((whole - 1) * group + 1)


def test_an_epoch_to_keep_that_the_run_does_not_reach_is_refused() -> None:
    changes = ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[40,41]"]
    with pytest.raises(ConfigError, match=r"checkpoint_epochs=\[40, 41\]: the run has 40 epochs"):
        make_plan(compose(changes).config())


def test_boundaries_are_rounded_halves_of_exact_products(reference: Config) -> None:
    for tokens, epoch, batch in ((20, 0.5, 131072), (3, 0.1, 8192), (2.4, 0.3, 32768)):
        training = replace(
            reference.training,
            tokens_per_parameter=tokens,
            epoch_tokens_per_parameter=epoch,
            batch_tokens=batch,
        )
        plan = make_plan(replace(reference, training=training))
        share = Fraction(str(epoch)) * plan.parameters / batch
        slow = [math.floor(k * share + Fraction(1, 2)) for k in range(1, len(plan.epoch_boundaries) + 1)]
        assert list(plan.epoch_boundaries) == slow
        assert len(slow) == Fraction(str(tokens)) / Fraction(str(epoch))


def test_raising_the_total_leaves_earlier_boundaries(reference: Config) -> None:
    longer = replace(reference, training=replace(reference.training, tokens_per_parameter=30))
    assert make_plan(longer).epoch_boundaries[:40] == make_plan(reference).epoch_boundaries


def test_every_update_belongs_to_the_epoch_that_its_boundary_closes(reference: Config) -> None:
    plan = make_plan(reference)
    assert [plan.epoch_of(u) for u in (0, 77, 78, 155, 156, 3112)] == [1, 1, 2, 2, 3, 40]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.tokens_per_parameter=20.25"], "20 and 20.5"),
        (["training.epoch_tokens_per_parameter=0.001"], "no update"),
        (["training.batch_tokens=1000"], "nearest are 1024"),
        (["training.batch_tokens=3072", "training.micro_batch_size=2"], "allowed: 1, 3"),
        (["decentralized=awc", "decentralized.num_models=5"], "128000 and 133120"),
        (["decentralized=awc", "training.micro_batch_size=16"], "training.micro_batch_size=32"),
        (
            [
                "decentralized=awc",
                "schedule.min_lr_ratio=0",
                "adaptive_consensus=on",
                "adaptive_consensus.p=1",
                "adaptive_consensus.start_frac=0.9996",
            ],
            "gamma is undefined",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(compose(overrides).config())


def test_schedules_pass_through_known_points() -> None:
    cosine = CosineSchedule("cosine", warmup_steps=50, min_lr_ratio=0.1)
    wsd = WsdSchedule("wsd", warmup_steps=50, decay_fraction=0.1)
    assert lr_factor(cosine, 525, 1000) == pytest.approx(0.55, abs=1e-12)
    assert lr_factor(cosine, 1000, 1000) == pytest.approx(0.1, abs=1e-12)
    assert lr_factor(wsd, 900, 1000) == 1.0
    assert lr_factor(wsd, 925, 1000) == pytest.approx(0.5, abs=1e-12)
    assert lr_factor(wsd, 964, 1000) == pytest.approx(0.2, abs=1e-12)
    assert lr_factor(wsd, 1000, 1000) == 0.0
    for schedule in (cosine, wsd, ConstantSchedule("constant", 50)):
        assert [lr_factor(schedule, s, 1000) for s in (1, 25, 50)] == [1 / 50, 0.5, 1.0]
        assert lr_factor(schedule, 20, 20) == 0.4  # a run may end inside its warm-up


def test_wsd_decays_no_earlier_than_its_warmup_ends() -> None:
    wsd = WsdSchedule("wsd", warmup_steps=90, decay_fraction=0.5)
    assert lr_factor(wsd, 90, 100) == 1.0
    assert lr_factor(wsd, 95, 100) == pytest.approx(1 - math.sqrt(0.5))


def packed(reference: Config, start: float, p: float, schedule: object = None) -> Config:
    awc = replace(reference.decentralized, scheme="awc", num_models=4)
    adaptive = AdaptiveConsensusConfig(True, start, p)
    return replace(
        reference, decentralized=awc, adaptive_consensus=adaptive, schedule=schedule or reference.schedule
    )


@pytest.mark.parametrize("start", [0.0, 0.05, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("p", [0.0, 0.5, 2.0])
def test_gamma_follows_the_rate_from_its_activation_on(reference: Config, start: float, p: float) -> None:
    plan = make_plan(packed(reference, start, p))
    first = math.ceil(Fraction(str(start)) * plan.updates)
    largest = max([plan.lr(r) for r in range(first, plan.updates)], default=0)
    for r in range(0, plan.updates, 37):
        expected = 1.0 if r < first or p == 0 else (plan.lr(r) / largest) ** p
        assert plan.gamma(r) == pytest.approx(expected, rel=1e-12)


def test_a_window_without_updates_and_a_zero_exponent_mix_in_full(reference: Config) -> None:
    zero = CosineSchedule("cosine", warmup_steps=0, min_lr_ratio=0)
    assert make_plan(packed(reference, 1.0, 3.0, zero)).gamma(3112) == 1.0
    assert make_plan(packed(reference, 0.9996, 0.0, zero)).gamma(3112) == 1.0


def test_mixing_every_third_update_counts_its_own_steps(reference: Config) -> None:
    awc = replace(reference.decentralized, scheme="awc", num_models=4, mix_every=3)
    plan = make_plan(replace(reference, decentralized=awc))
    assert [r for r in range(10) if plan.mixes(r)] == [2, 5, 8]
    assert [plan.mixing_step(r) for r in (2, 5, 8)] == [0, 1, 2]


def test_the_micro_batch_shrinks_until_it_fits(reference: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_llm.config import memory

    sizes = []
    for gigabytes in (1, 4, 16, 64):
        monkeypatch.setattr(memory, "_device_bytes", lambda _, g=gigabytes: g * 2**30)
        plan = make_plan(reference)
        assert plan.memory_bytes <= gigabytes * 2**30 or plan.micro_batch_size == 1
        assert plan.micro_batch_size * plan.accumulation == 128
        sizes.append(plan.micro_batch_size)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
