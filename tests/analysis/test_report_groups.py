"""Runs that differ in their seed alone are averaged, all others kept apart, and the groups are ranked."""

from __future__ import annotations

import math
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_directories import make_run

from tiny_llm.analysis.groups import Report, make_report, statistic
from tiny_llm.analysis.keys import followers, label_of, short_name, swept_keys, value_of, varying_keys
from tiny_llm.analysis.runs import LOSS, METRICS, SPEED, RunRecord, find_runs, read_run


def report_of(folder: Path) -> Report:
    return make_report([read_run(directory) for directory in find_runs([folder])])


def record(loss: float, seed: int = 1, name: str = "run", **settings: Any) -> RunRecord:
    """A complete run with settings such as lr=0.1, below `optimizer`."""
    dotted = {f"optimizer.{key}": value for key, value in settings.items()}
    return RunRecord(Path(name), "complete", dotted, seed, metrics={LOSS: loss})


def slow_statistic(values: list[float]) -> tuple[float, float]:
    """Mean and sample SD, by their definitions."""
    mean = math.fsum(values) / len(values)
    squares = [(value - mean) ** 2 for value in values]
    return mean, math.sqrt(math.fsum(squares) / (len(values) - 1))


def test_means_and_sds_equal_numpys_and_a_plain_loops(tmp_path: Path) -> None:
    draw = random.Random()
    made: dict[str, list[dict[str, float]]] = {"awc": [], "atc": []}
    for scheme, runs in made.items():
        for seed in range(2 + len(scheme) * (scheme == "awc")):
            values = {"loss": 4 + draw.random(), "seconds": 100 + draw.random(), "consensus": draw.random()}
            make_run(
                tmp_path / f"{scheme}{seed}", f"decentralized={scheme}", f"runtime.seed={seed}", **values
            )
            tokens_per_second = 400 * 8192 / values["seconds"]
            expected = (values["loss"], tokens_per_second, values["seconds"] / 3600, values["consensus"])
            runs.append(dict(zip(METRICS, expected, strict=True)))
    for group in report_of(tmp_path).groups:
        runs = made[group.settings["decentralized.scheme"]]
        for name in METRICS:
            values_of_name = [run[name] for run in runs]
            found = group.statistics[name]
            assert found.n == len(runs)
            assert (found.mean, found.sd) == pytest.approx(slow_statistic(values_of_name), rel=1e-9)
            assert found.mean == pytest.approx(np.mean(values_of_name), rel=1e-12)
            assert found.sd == pytest.approx(np.std(values_of_name, ddof=1), rel=1e-9)
            assert found.best == pytest.approx((max if name == SPEED else min)(values_of_name))


def test_a_single_run_has_no_sd() -> None:
    assert statistic([4.0]).sd is None


def test_the_order_of_equal_values_changes_no_bit() -> None:
    values = [0.1, 0.2, 0.3, 1e9]
    assert len({statistic(order) for order in permutations(values)}) == 1


def test_runs_that_differ_in_what_changes_no_number_are_one_group(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "runtime.seed=1", loss=4.0)
    make_run(tmp_path / "b", "runtime.seed=2", "training.micro_batch_size=4", "runtime.device=cpu", loss=4.2)
    make_run(tmp_path / "c", "runtime.seed=3", "tracking=tensorboard", "data.cache_dir=elsewhere", loss=4.4)
    report = report_of(tmp_path)
    assert [(group.seeds, group.statistics[LOSS].mean) for group in report.groups] == [
        ((1, 2, 3), pytest.approx(4.2))
    ]
    assert report.keys == ()


def test_any_other_difference_makes_another_group_and_a_column(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "decentralized=awc", "topology=ring", loss=4.1)
    make_run(tmp_path / "b", "decentralized=awc", "topology=complete", loss=4.0)
    make_run(tmp_path / "c", "decentralized=awc", "topology=complete", "evaluation.seed=1", loss=4.2)
    report = report_of(tmp_path)
    assert report.keys == ("topology.name", "evaluation.seed")
    assert [value_of(group.settings, "topology.name") for group in report.groups] == [
        "complete",
        "ring",
        "complete",
    ]
    assert report.shared["decentralized.scheme"] == "awc"
    assert "topology.name" not in report.shared


def test_a_key_that_some_configurations_lack_is_missing_there(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "schedule=wsd", "schedule.decay_fraction=0.1", loss=4.0)
    make_run(tmp_path / "b", "schedule=wsd", "schedule.decay_fraction=0.2", loss=4.1)
    make_run(tmp_path / "c", "schedule=cosine", loss=4.2)
    report = report_of(tmp_path)
    assert report.keys == ("schedule.name", "schedule.decay_fraction")  # min_lr_ratio says nothing more
    assert [[value_of(group.settings, key) for key in report.keys] for group in report.groups] == [
        ["wsd", "0.1"],
        ["wsd", "0.2"],
        ["cosine", "-"],
    ]
    assert report.swept_keys() == list(report.keys)


def test_an_old_run_without_a_key_of_new_ones_is_shown_to_be_different() -> None:
    report = make_report([record(4.0, lr=0.1), record(4.1, lr=0.1, amsgrad=False)])
    assert len(report.groups) == 2
    assert report.keys == ("optimizer.amsgrad",)


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_an_incomplete_run_is_listed_and_never_averaged_in(tmp_path: Path, status: str) -> None:
    make_run(tmp_path / "a", "runtime.seed=1", loss=4.0)
    make_run(tmp_path / "b", "runtime.seed=2", loss=4.2)
    make_run(tmp_path / "c", "runtime.seed=3", loss=99.0, status=status, updates=200)
    (tmp_path / "c/result.json").write_text((tmp_path / "a/result.json").read_text())
    report = report_of(tmp_path)
    assert report.groups[0].statistics[LOSS] == statistic([4.0, 4.2])
    assert [(run.directory.name, run.status) for run in report.left_out] == [("c", status)]


def test_a_configuration_without_a_complete_run_is_no_group_but_its_keys_are_columns(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "optimizer.lr=0.001", loss=4.0)
    make_run(tmp_path / "b", "optimizer.lr=0.1", status="failed", error="diverged", updates=50)
    report = report_of(tmp_path)
    assert len(report.groups) == 1
    assert report.keys == ("optimizer.lr",)


def test_a_seed_that_is_there_twice_counts_once() -> None:
    runs = [record(4.0, 1, "first", lr=1), record(4.2, 2, lr=1), record(5.0, 1, "again", lr=1)]
    report = make_report([*runs, record(5.0, 1, lr=2)])
    assert report.groups[0].statistics[LOSS] == statistic([4.0, 4.2])
    (repeated,) = report.left_out
    assert (repeated.directory, repeated.status) == (Path("again"), "repeated")
    assert repeated.reason == "seed 1 of this configuration is counted from first"


def test_groups_are_ranked_by_mean_loss_whatever_their_best() -> None:
    report = make_report(
        [record(4.0, 1, lr=1), record(4.4, 2, lr=1), record(4.1, 1, lr=2), record(4.2, 2, lr=2)]
    )
    assert [(group.number, group.settings["optimizer.lr"]) for group in report.groups] == [(1, 2), (2, 1)]


def test_ties_go_to_the_lower_lr_then_beta1_then_beta2() -> None:
    ranked = [
        {"lr": 0.001, "beta1": 0.95, "beta2": 0.99},
        {"lr": 0.002, "beta1": 0.9, "beta2": 0.99},
        {"lr": 0.002, "beta1": 0.95, "beta2": 0.95},
        {"lr": 0.002, "beta1": 0.95, "beta2": 0.98},
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.9},
    ]
    losses = [0.1, 0.2, 0.3]  # whose sum depends on the order in which they are added
    for order in permutations(ranked):
        runs = [
            record(loss, seed, **settings)
            for turn, settings in enumerate(order)
            for seed, loss in enumerate(losses[turn % 3 :] + losses[: turn % 3])
        ]
        report = make_report(runs)
        assert [group.settings for group in report.groups] == [
            {f"optimizer.{key}": value for key, value in settings.items()} for settings in ranked
        ]


def test_different_token_caches_within_a_group_are_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "runtime.seed=1", data="aaaaaaaaaaaaaaaa")
    make_run(tmp_path / "b", "runtime.seed=2", data="bbbbbbbbbbbbbbbb")
    make_run(tmp_path / "c", "optimizer.lr=0.1", data="cccccccccccccccc", loss=5.0)
    assert report_of(tmp_path).notes == (
        "group 1 averages runs on different token caches: aaaaaaaaaaaa, bbbbbbbbbbbb",
    )


def test_keys_that_follow_from_another_are_not_swept() -> None:
    schemes = [("off", 0.1, 1), ("awc", 0.2, 4), ("awc", 0.2, 8), ("atc", 0.1, 4), ("atc", 0.1, 8)]
    names = ("decentralized.scheme", "optimizer.lr", "decentralized.num_models")
    configurations = [dict(zip(names, values, strict=True)) for values in schemes]
    assert followers(configurations, names, "decentralized.scheme") == ["optimizer.lr"]
    assert swept_keys(configurations, names) == ["decentralized.scheme", "decentralized.num_models"]
    here = {"optimizer.lr": 1, "optimizer.eps": 2, "data.name": "a"}
    there = {"optimizer.lr": 3, "optimizer.eps": 4, "data.name": "b"}
    assert varying_keys([here, there]) == ("data.name", "optimizer.lr", "optimizer.eps")
    assert swept_keys([{"a": 1, "b": 2}, {"a": 3, "b": 4}], ["a", "b"]) == ["a"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.005, "0.005"),
        (20.0, "20"),
        (1e-5, "1e-05"),
        (4, "4"),
        (None, "null"),
        (True, "true"),
        ([1, 5], "[1,5]"),
    ],
)
def test_values_are_written_as_on_the_command_line(value: Any, written: str) -> None:
    assert value_of({"key": value}, "key") == written


@pytest.mark.parametrize(
    ("key", "short"),
    [
        ("optimizer.lr", "lr"),
        ("topology.name", "topology"),
        ("decentralized.scheme", "scheme"),
        ("adaptive_consensus.enabled", "adaptive_consensus"),
        ("topology.seed", "topology.seed"),
    ],
)
def test_keys_have_short_names(key: str, short: str) -> None:
    assert short_name(key) == short


def test_a_label_names_what_it_says() -> None:
    settings = {"topology.name": "ring", "optimizer.lr": 0.008, "decentralized.scheme": "awc"}
    keys = ("decentralized.scheme", "topology.name", "optimizer.lr", "schedule.decay_fraction")
    assert label_of(settings, keys) == "awc, ring, lr 0.008"
