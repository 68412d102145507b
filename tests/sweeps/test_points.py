"""Points: what they are called, when two are one, and what a sweep refuses before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_llm.config.compose import check_overrides, compose
from tiny_llm.config.errors import ConfigError
from tiny_llm.config.saved import recipe_identity
from tiny_llm.sweeps.points import Point, make_points, point_name

SWEEP = Path("outputs/sweeps/s")


def points_of(*lines: str, known: dict[str, str] | None = None) -> list[Point]:
    return make_points([compose(line.split()) for line in lines], SWEEP, known or {})


def test_a_name_says_what_varies_and_begins_the_identity() -> None:
    first, second = points_of(
        "data=stdlib decentralized=awc topology=ring", "data=stdlib decentralized=awc topology=complete"
    )
    assert first.name == f"topology-ring+{first.identity[:8]}"
    assert second.directory == SWEEP / f"topology-complete+{second.identity[:8]}"
    assert first.identity == recipe_identity(first.config) != second.identity


def test_a_name_is_safe_in_shells_paths_and_overrides() -> None:
    overrides = ["data.paths=['a b*.txt','$(rm)']", "sample_prompt=../../x", "optimizer.lr=1e-4"]
    name = point_name(overrides, {"data.paths", "sample_prompt", "optimizer.lr"}, "0123456789")
    assert name == "paths-a-b-.txt-rm+sample_prompt-x+lr-1e-4+01234567"
    assert compose([f"output_dir={name}"]).values["output_dir"] == name
    assert point_name(["optimizer.lr=1e+30"], {"optimizer.lr"}, "0123456789") == "lr-1e30+01234567"


def test_a_long_name_keeps_what_was_typed_last() -> None:
    overrides = [f"optimizer.beta1=0.{number:050}" for number in range(9)] + ["runtime.seed=7"]
    name = point_name(overrides, {"optimizer.beta1", "runtime.seed"}, "0123456789")
    assert name.endswith("+seed-7+01234567")
    assert len(name) < 128


def test_a_point_keeps_the_name_that_its_sweep_gave_it() -> None:
    (point,) = points_of("data=stdlib runtime.seed=7")
    (again,) = points_of("data=stdlib runtime.seed=7 runtime.threads=1", known={point.identity: "chosen"})
    assert again.directory == SWEEP / "chosen"


def test_a_run_under_a_launcher_saves_every_half_hour_unless_told_otherwise() -> None:
    default, chosen = points_of("data=stdlib", "data=stdlib training.recovery_minutes=5 runtime.seed=1")
    assert default.config.training.recovery_minutes == 30
    assert chosen.config.training.recovery_minutes == 5


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("data=stdlib", "data=stdlib optimizer.lr=-1"), "point 2 of 2 (optimizer.lr=-1): optimizer.lr=-1"),
        (("data=stdlib", "data=stdlib training.batch_tokens=100"), "expected a multiple of"),
        (
            (
                "data=stdlib",
                "data=stdlib topology=hypercube decentralized.num_models=6 training.batch_tokens=98304",
            ),
            "point 2 of 2 (topology=hypercube decentralized.num_models=6 training.batch_tokens=98304): topology",
        ),
        (
            ("data=stdlib", "data=stdlib runtime.threads=2"),
            "differs from another point in runtime.threads alone",
        ),
        (("data=stdlib", "data=stdlib"), "is the same as another point"),
        (("data=stdlib output_dir=x",), "output_dir would be ignored"),
        (("data=stdlib resume=x",), "resume would be ignored"),
        (
            ("data=stdlib runtime.device=cuda:1",),
            "runtime.device=cuda:1: the launcher gives each run its device",
        ),
        (("sweep_name=a", "sweep_name=b"), "one sweep has one name"),
    ],
)
def test_one_bad_point_refuses_the_sweep(lines: tuple[str, ...], words: str) -> None:
    lines = tuple(line.replace("data=stdlib", "data=stdlib decentralized=awc", 1) for line in lines)
    with pytest.raises(ConfigError) as error:
        points_of(*lines)
    assert words in str(error.value)


def test_a_setting_of_the_launcher_is_refused_inside_the_swept_values() -> None:
    composed = compose(["data=stdlib"])
    composed.overrides.append("hydra.launcher.timeout_min=3")
    with pytest.raises(ConfigError, match="timeout_min=3 would be ignored"):
        make_points([composed], SWEEP, {})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("retry_failed=true", "did you mean 'hydra.launcher.retry_failed'"),
        ("hydra.launcher.max_paralel=2", "did you mean 'hydra.launcher.max_parallel'"),
        ("+hydra.launcher.colour=red", "unknown key 'hydra.launcher.colour'"),
        ("hydra/launcher=basic", "expected local | slurm"),
    ],
)
def test_a_mistyped_launcher_setting_is_one_clear_line(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_overrides([override])
    assert words in str(error.value)
