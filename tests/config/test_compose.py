"""Composition: defaults, choices that follow choices, and one line for every mistake."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_llm.config.compose import compose, config_groups, user_errors_in_one_line
from tiny_llm.config.errors import ConfigError, UserError
from tiny_llm.config.plan import make_plan
from tiny_llm.config.saved import plain, read_yaml, recipe_identity, to_yaml

GROUPS = config_groups()


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_composes_into_a_plan(experiment: str) -> None:
    assert make_plan(compose([f"experiment={experiment}"]).config()).updates > 0


@pytest.mark.parametrize(
    "choice", [f"{g}={o}" for g in ("model", "data", "schedule", "runtime") for o in GROUPS[g]]
)
def test_every_option_composes(choice: str) -> None:
    compose([choice, "data.paths=[a.txt]"] if choice == "data=text" else [choice]).config()


@pytest.mark.parametrize("topology", GROUPS["topology"])
@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_topologies_compose_with_schemes(topology: str, scheme: str) -> None:
    config = compose([f"decentralized={scheme}", f"topology={topology}"]).config()
    assert (config.topology.name, config.decentralized.num_models) == (topology, 4)


@pytest.mark.parametrize(
    ("overrides", "lr", "betas"),
    [
        ([], 0.0056, (0.9, 0.98)),
        (["decentralized=awc"], 0.008, (0.95, 0.99)),
        (["decentralized=atc"], 0.0056, (0.9, 0.99)),
        (["decentralized=awc", "optimizer=adamw_off"], 0.0056, (0.9, 0.98)),
        (["decentralized=awc", "optimizer.lr=1"], 1.0, (0.95, 0.99)),
        (["experiment=packed8-20m-awc"], 0.0056, (0.95, 0.999)),
        (["experiment=packed8-20m-awc-cosine-to-zero"], 0.014, (0.95, 0.99)),
        (["experiment=quickstart", "decentralized=off"], 0.005, (0.9, 0.98)),
    ],
)
def test_the_optimizer_follows_the_scheme_and_stays_overridable(
    overrides: list[str], lr: float, betas: tuple[float, float]
) -> None:
    optimizer = compose(overrides).config().optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (lr, *betas)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.lrr=1"], "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'"),
        (["+optimizer.lrr=1"], "did you mean 'optimizer.lr'"),
        (["++optimizer.lrr=1"], "did you mean 'optimizer.lr'"),
        (["++nonsense=1"], "unknown key 'nonsense'"),
        (["++schedule.min_lr_ratio=1", "schedule=wsd"], "unknown key 'schedule.min_lr_ratio'"),
        (["schedule.min_lr_ratio=1", "schedule=wsd"], "unknown key 'schedule.min_lr_ratio'"),
        (["~optimizer.lr"], "optimizer.lr is missing"),
        (["optimizer.lr"], "write key=value"),
        (["optimizer.lr=nan"], "optimizer.lr=nan: expected a finite number >= 0"),
        (["runtime.seed=-1"], "runtime.seed=-1: expected an integer >= 0 and <= 4294967295"),
        (["optimizer.lr=1" + "0" * 400], "expected a number >= 0"),
        (
            ["sweep_name=../there"],
            "sweep_name=../there: expected the name of one directory below outputs/sweeps",
        ),
        (["sweep_name=.."], "expected the name of one directory"),
        (["optimizer.lr=inf"], "optimizer.lr=inf"),
        (["optimizer.lr=-1"], "optimizer.lr=-1: expected a number >= 0"),
        (["optimizer.beta1=1"], "optimizer.beta1=1: expected a number >= 0 and < 1"),
        (["optimizer.lr=true"], "optimizer.lr=true"),
        (["optimizer.lr=${nothing}"], "nothing"),
        (["training.log_every=1.5"], "training.log_every=1.5: expected an integer >= 1"),
        (["training.log_every=null"], "training.log_every=null"),
        (["runtime.precision=bf61"], "did you mean 'bf16'"),
        (["runtime.device=gpu"], "runtime.device=gpu: expected auto, cpu, cuda or cuda:N"),
        (["model=21m"], "did you mean '20m'"),
        (["model.heads=6"], "nearest is 5"),
        (["model.vocab_size=100"], "raise it"),
        (["data.vocab_size=70000"], "<= 65536"),
        (["training.checkpoint_policy=explicit"], "wants a list"),
        (["training.checkpoint_epochs=[1,0]"], "training.checkpoint_epochs"),
        (["topology=ring"], "topology would be ignored"),
        (["topology.k=2"], "topology.k would be ignored"),
        (["adaptive_consensus=on"], "adaptive_consensus would be ignored"),
        (["decentralized.num_models=4"], "would be ignored"),
        (["decentralized=awc", "adaptive_consensus=on"], "start_frac=null: required"),
        (["decentralized=awc", "adaptive_consensus.p=1"], "add adaptive_consensus=on"),
    ],
)
def test_a_mistake_says_key_value_and_way_out(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides).config()
    assert words in str(caught.value)


def test_ctrl_c_and_what_the_system_refuses_end_a_door_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for error, code, printed in (
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left", "x/y.json"),
            2,
            "error: x/y.json: the disk is full; free space\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "x"),
            2,
            "error: x: permission denied; choose another",
        ),
        (UserError("two\nlines"), 2, "error: two lines\n"),
    ):
        with pytest.raises(SystemExit) as end, user_errors_in_one_line():
            raise error
        assert (end.value.code, capsys.readouterr().err.startswith(printed)) == (code, True)
    with pytest.raises(FileNotFoundError), user_errors_in_one_line():
        raise FileNotFoundError(errno.ENOENT, "No such file", "inside")  # ours to mend: the traceback stays


def test_whole_numbers_may_be_written_as_floats() -> None:
    training = compose(["training.log_every=1e1", "training.batch_tokens=1.31072e5"]).config().training
    assert (training.log_every, training.batch_tokens) == (10, 131072)
    assert isinstance(training.batch_tokens, int)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.eps=1e-4", "optimizer.grad_clip=null"],
        [
            "decentralized=awc",
            "schedule=wsd",
            "adaptive_consensus=on",
            "adaptive_consensus.start_frac=0.5",
            "adaptive_consensus.p=1e-7",
        ],
        ["data=text", "data.paths=['a b*.txt','on','1e5']", "sample_prompt='null'"],
        ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[1,3]", "sample_prompt='x: #'"],
    ],
)
def test_a_resolved_config_reads_back_equal(overrides: list[str], tmp_path: Path) -> None:
    config = compose(overrides).config()
    path = tmp_path / "resolved.yaml"
    path.write_text(to_yaml(config))
    assert read_yaml(path) == config


def test_the_identity_is_that_of_the_recipe_alone() -> None:
    def identity(*overrides: str) -> str:
        return recipe_identity(compose(list(overrides)).config())

    assert identity() == identity(
        "runtime.threads=1", "data.prefetch=false", "output_dir=x", "data.cache_dir=y"
    )
    different = [
        identity(),
        identity("runtime.seed=43"),
        identity("optimizer.lr=0.1"),
        identity("schedule=wsd"),
    ]
    assert len(set(different)) == 4


def test_plain_values_are_json() -> None:
    values = plain(
        compose(["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[2]"]).config()
    )
    assert json.loads(json.dumps(values)) == values


def door(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tiny_llm.train", *words], capture_output=True, text=True, cwd=cwd, timeout=60
    )


@pytest.mark.parametrize("words", [["++nonsense=1"], ["optimizer.lr=nan"], ["resume=nowhere"], ["model=21m"]])
def test_the_door_prints_one_line_and_exits_with_2(words: list[str], tmp_path: Path) -> None:
    done = door(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_one_json_object_and_writes_nothing(tmp_path: Path) -> None:
    done = door("model=20m", "dry_run=true", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert (plan["updates"], plan["tokens"], plan["parameters"]) == (3113, 408_027_136, 20_403_520)
    assert (done.stderr, list(tmp_path.iterdir())) == ("", [])


def test_help_lists_groups_with_their_options(tmp_path: Path) -> None:
    done = door("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(
        group in done.stdout for group in ("adaptive_consensus: ", "topology: base_k, complete", "model: 20m")
    )


def test_looking_at_a_plan_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['train', 'dry_run=true']; "
        "runpy.run_module('tiny_llm.train', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
