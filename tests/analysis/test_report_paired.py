"""Differences over shared seeds, with their interval; and how a command line names the groups."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_llm.analysis.choice import baselines, compared_groups
from tiny_llm.analysis.groups import Report, make_report
from tiny_llm.analysis.paired import difference, student_t_quantile
from tiny_llm.analysis.runs import LOSS, RunRecord
from tiny_llm.config.errors import UserError

# Student's t in tables: degrees of freedom, then the quantiles 0.9, 0.95, 0.975, 0.99, 0.995.
TABLE = """
1    3.078  6.314  12.706 31.821 63.657
2    1.886  2.920  4.303  6.965  9.925
3    1.638  2.353  3.182  4.541  5.841
4    1.533  2.132  2.776  3.747  4.604
5    1.476  2.015  2.571  3.365  4.032
9    1.383  1.833  2.262  2.821  3.250
10   1.372  1.812  2.228  2.764  3.169
29   1.311  1.699  2.045  2.462  2.756
30   1.310  1.697  2.042  2.457  2.750
100  1.290  1.660  1.984  2.364  2.626
"""


def runs(
    losses: dict[int, float], scheme: str = "awc", topology: str | None = "ring", **more: Any
) -> list[RunRecord]:
    """Complete runs of one configuration, a seed each."""
    settings = {"decentralized.scheme": scheme, "schedule.name": "cosine"}
    settings |= {"topology.name": topology} if topology else {}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return [
        RunRecord(Path(f"{scheme}{seed}"), "complete", settings, seed, metrics={LOSS: loss})
        for seed, loss in losses.items()
    ]


def small_sweep() -> Report:
    """Ranks: 1 off; 2 awc complete; 3 awc ring; 4 atc complete; 5 atc ring."""
    seeds = (1, 2, 3)
    found = runs(dict.fromkeys(seeds, 3.0), "off", None, optimizer__lr=0.1, decentralized__num_models=1)
    for number, (scheme, topology, lr) in enumerate(
        [("awc", "complete", 0.2), ("awc", "ring", 0.2), ("atc", "complete", 0.1), ("atc", "ring", 0.1)], 1
    ):
        losses = dict.fromkeys(seeds, 3 + number / 10)
        found += runs(losses, scheme, topology, optimizer__lr=lr, decentralized__num_models=4)
    return make_report(found)


@pytest.mark.parametrize("line", TABLE.split("\n")[1:-1])
def test_quantiles_are_those_of_the_tables(line: str) -> None:
    degrees, *expected = line.split()
    for probability, value in zip((0.9, 0.95, 0.975, 0.99, 0.995), expected, strict=True):
        assert student_t_quantile(probability, int(degrees)) == pytest.approx(float(value), abs=5.01e-4)


def test_quantiles_agree_with_an_integral_of_the_density() -> None:
    for degrees in (1, 2, 3, 7, 8, 40):
        quantile = student_t_quantile(0.975, degrees)
        constant = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        t = np.linspace(0, quantile, 200_001)
        density = constant * (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
        assert np.trapezoid(density, t) == pytest.approx(0.475, abs=1e-8)
        assert student_t_quantile(0.025, degrees) == pytest.approx(-quantile)


def test_a_difference_is_the_mean_over_shared_seeds_with_sd_and_interval() -> None:
    a, b = {1: 4.10, 2: 4.25, 3: 4.05, 9: 1.0}, {3: 4.00, 1: 4.02, 2: 4.20, 8: 99.0}
    report = make_report([*runs(a), *runs(b, topology="complete")])
    ring, complete = report.groups
    found = difference(ring, complete)
    pairs = [a[seed] - b[seed] for seed in (1, 2, 3)]
    assert found.seeds == (1, 2, 3)
    assert found.mean == pytest.approx(np.mean(pairs))
    assert found.sd == pytest.approx(np.std(pairs, ddof=1))
    reach = 4.302652729911275 * np.std(pairs, ddof=1) / math.sqrt(3)  # t of 0.975 with 2 df
    assert (found.low, found.high) == pytest.approx((np.mean(pairs) - reach, np.mean(pairs) + reach))
    turned = difference(complete, ring)
    assert (turned.mean, turned.low) == pytest.approx((-found.mean, -found.high))


def test_luck_that_a_seed_gives_to_both_drops_out() -> None:
    luck = {1: 0.0, 2: 0.3, 3: -0.4}
    report = make_report(
        [
            *runs({seed: 4 + luck[seed] for seed in luck}),
            *runs({seed: 4.1 + luck[seed] for seed in luck}, topology="star"),
        ]
    )
    found = difference(report.groups[1], report.groups[0])
    assert (found.mean, found.sd) == pytest.approx((0.1, 0.0))


def test_one_shared_seed_gives_a_difference_without_sd_or_interval() -> None:
    report = make_report([*runs({1: 4.0, 2: 4.2}), *runs({2: 4.5, 3: 4.6}, topology="star")])
    found = difference(report.groups[1], report.groups[0])
    assert (found.mean, found.sd, found.low, found.high) == (pytest.approx(0.3), None, None, None)


def test_without_a_shared_seed_the_means_are_subtracted() -> None:
    report = make_report([*runs({1: 4.0, 2: 4.2}), *runs({3: 4.5}, topology="star")])
    found = difference(report.groups[1], report.groups[0])
    assert (found.mean, found.sd, found.seeds) == (pytest.approx(0.4), None, ())


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,3", (1, 3)),
        ("3,1", (3, 1)),
        ("scheme=off,2", (1, 2)),
        ("scheme=awc+topology=ring,topology.name=complete+decentralized=atc", (3, 4)),
        ("lr=0.2+topology=complete,lr=1e-1+topology=ring", (2, 5)),
        ("num_models=1,optimizer.lr=.2+topology=ring", (1, 3)),
    ],
)
def test_groups_are_named_by_number_or_by_conditions(text: str, numbers: tuple[int, int]) -> None:
    one, other = compared_groups(small_sweep(), text)
    assert (one.number, other.number) == numbers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1", "expected two groups A,B"),
        ("1,2,3", "expected two groups A,B"),
        ("1,", "expected two groups A,B"),
        ("1,6", "no group with a complete run is 6; groups are 1, 2, 3, 4, 5"),
        ("0,1", "no group with a complete run is 0"),
        (
            "1,awc",
            "'awc' is no number and no KEY=VALUE; keys that vary are decentralized.scheme, topology.name",
        ),
        ("1,topolgy=ring", "unknown key 'topolgy'; did you mean 'topology'?"),
        ("1,topology=", "'topology=' is no number and no KEY=VALUE"),
        ("1,topology=star", "no group with a complete run is topology=star"),
        ("1,topology=ring", "topology=ring holds for the groups 3, 5; add conditions with +"),
        ("2,lr=0.2+topology=complete", "both name group 2; name two groups"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_there(text: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        compared_groups(small_sweep(), text)
    assert str(refusal.value).startswith(f"compare={text}: ")
    assert said in str(refusal.value)


def test_a_key_that_could_be_two_is_refused_unless_one_of_them_varies() -> None:
    report = make_report([*runs({1: 4.0}), *runs({1: 4.1}, topology="star")])
    assert compared_groups(report, "name=ring,name=star")[0].number == 1  # schedule.name does not vary
    both = make_report([*runs({1: 4.0}), *runs({1: 4.1}, topology="star", schedule__name="wsd")])
    with pytest.raises(UserError, match=r"'name' may be schedule\.name, topology\.name; write the key whole"):
        compared_groups(both, "name=ring,name=star")


def test_groups_without_a_shared_seed_are_not_compared() -> None:
    report = make_report([*runs({1: 4.0, 2: 4.0}), *runs({3: 4.1}, topology="star")])
    with pytest.raises(UserError, match=r"groups 1 and 2 share no seed \(complete are 1, 2 and 3\)"):
        compared_groups(report, "1,2")


@pytest.mark.parametrize(
    ("text", "bases"),
    [
        ("topology=complete", {2: 2, 3: 2, 4: 4, 5: 4}),  # within each scheme; off has no topology: two fit
        ("scheme=awc", {1: None, 2: 2, 3: 3, 4: 2, 5: 3}),  # atc brings its own lr
        ("scheme=off", {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}),  # and off its one worker
    ],
)
def test_a_baseline_is_the_group_with_the_value_that_is_otherwise_equal(
    text: str, bases: dict[int, int | None]
) -> None:
    found = {number: base.number for number, base in baselines(small_sweep(), text).items()}
    assert found == {number: base for number, base in bases.items() if base is not None}


def test_a_baseline_with_another_value_of_a_swept_key_is_none() -> None:
    found = [
        *runs({1: 4.0}, topology="complete", optimizer__lr=0.1),
        *runs({1: 4.1}, topology="complete", optimizer__lr=0.2),
        *runs({1: 4.2}, topology="ring", optimizer__lr=0.2),
        *runs({1: 4.3}, topology="ring", optimizer__lr=0.3),
    ]
    bases = baselines(make_report(found), "topology=complete")
    assert {number: base.number for number, base in bases.items()} == {1: 1, 2: 2, 3: 2}


def test_a_synchronous_run_is_the_baseline_of_any_number_of_workers() -> None:
    found = [
        *runs({1: 4.0}, "off", None, decentralized__num_models=1),
        *runs({1: 4.1}, decentralized__num_models=4),
        *runs({1: 4.2}, decentralized__num_models=8),
    ]
    bases = baselines(make_report(found), "scheme=off")
    assert {number: base.number for number, base in bases.items()} == {1: 1, 2: 1, 3: 1}
    assert set(baselines(make_report(found[1:]), "num_models=4")) == {1, 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topology", "'topology' is no number and no KEY=VALUE"),
        ("topology=star", "no complete run has this value; topology.name is complete, ring in the table"),
        ("schedule=cosine", "schedule.name is the same in all runs; keys that vary are decentralized.scheme"),
        ("tpology=ring", "did you mean 'topology'"),
    ],
)
def test_a_wrong_baseline_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        baselines(small_sweep(), text)
    assert said in str(refusal.value)
