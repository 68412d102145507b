"""`python -m tiny_llm.topologies`: the table, the drawings and the one-line refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_llm import topologies as door
from tiny_llm.decentralized.topology import TOPOLOGY_NAMES, Topology, make_topology


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """Run the door and return the cells of each row by topology."""
    door.main(list(arguments))
    cells = [line.replace(" D", "").split() for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1:] for row in cells if row and row[0] in TOPOLOGY_NAMES}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, table: bool = False) -> str:
    """Run the door, which must refuse, and return what it says."""
    with pytest.raises(SystemExit, match="2"):
        door.main(list(arguments))
    captured = capsys.readouterr()
    assert bool(captured.out) == table
    assert captured.err.count("\n") == 1
    return captured.err


def test_eight_workers_give_one_row_a_topology(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "num_models=8")
    assert tuple(table) == TOPOLOGY_NAMES
    assert table["one_peer_exponential"] == ["1", "yes", "3", "3", "1.0000", "1.00"]
    assert table["ring"] == ["2", "yes", "1", "never", "0.1953", "2.00"]
    assert table["star"] == ["7", "yes", "1", "never", "0.1250", "1.75"]
    assert table["random_matching"][:4] == ["1", "yes", "random", "never"]


def test_names_choose_and_order_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "num_models=12", "names=ring,base_k", "k=2")
    assert list(table) == ["ring", "base_k"]
    assert table["base_k"][:4] == ["2", "yes", "3", "3"]


def test_a_topology_that_refuses_the_size_has_a_row_and_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    door.main(["num_models=6"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "hypercube refused - - - - -" in printed
    assert "'one_peer_hypercube' needs num_models to be a power of two, got 6; nearest are 4 and 8" in printed


def test_a_matrix_that_is_not_doubly_stochastic_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Topology, "peers", lambda self, t: [[(0, 1.0)]] * self.num_models)
    assert rows(capsys, "names=ring")["ring"][1] == "no"


def test_the_seed_moves_the_random_rows_only(capsys: pytest.CaptureFixture[str]) -> None:
    """... and of these only what is counted over drawn steps: matchings of a size have as many pairs each."""
    zero, one = (rows(capsys, f"seed={seed}", "num_models=8") for seed in (0, 1))
    assert {name for name in TOPOLOGY_NAMES if zero[name] != one[name]} == {"equidyn"}


def test_the_table_is_whole_without_a_terminal(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tiny_llm.topologies",
        "num_models=200",
        "names=complete,one_peer_exponential",
    ]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"COLUMNS": "20"}
    ).stdout
    assert "199.00 D" in printed
    assert "one_peer_exponential " in printed
    assert "…" not in printed


def test_rich_matplotlib_and_torch_load_only_when_needed() -> None:
    code = (
        "import sys, tiny_llm.topologies; sys.exit(bool({'rich', 'matplotlib', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_the_usage(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    door.main(["num_models=8", flag])
    assert "usage: python -m tiny_llm.topologies" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_leaves_one_whole_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"graphs.{suffix}"
    rows(capsys, "num_models=5", "names=base_k,static_exponential,equidyn", f"plot={path}")
    assert list(tmp_path.iterdir()) == [path]
    assert (b"\x89PNG" if suffix == "png" else b"<svg") in path.read_bytes()


def test_plot_draws_every_pair_once_a_step(tmp_path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch

    counts = {}
    for name in ("complete", "static_exponential", "one_peer_ring", "base_k"):
        panel = Figure().subplots()
        door.draw_graph(panel, make_topology(name, 5))
        counts[name] = sum(isinstance(patch, FancyArrowPatch) for patch in panel.patches)
    # static_exponential: offsets 1, 2 and 4, of which 1 and 4 are each other's way back
    assert counts == {
        "complete": 10,
        "static_exponential": 5 + 5,
        "one_peer_ring": 2 * 5,
        "base_k": 2 + 2 + 2 + 2 + 2,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["num_modles=8"],
            "argument 'num_modles=8': allowed are num_models=..., .*did you mean 'num_models'",
        ),
        (["--plot"], "argument '--plot': allowed are"),
        (["k"], "argument 'k': .*write k=VALUE"),
        (["num_models=x"], "num_models=x: allowed are whole numbers in 1..256"),
        (["num_models=0"], "num_models=0: allowed"),
        (["num_models=2.5"], "num_models=2.5: allowed"),
        (["num_models=257"], "num_models=257: allowed"),
        (["num_models=4", "num_models=8"], "num_models=8: num_models is already 4"),
        (["names=rnig"], "names=rnig: allowed are complete, .*did you mean 'ring'"),
        (["num_models=4", "k=4"], "k=4: allowed are whole numbers in 1..3"),
        (["names=ring", "k=2"], "k=2: base_k must be in names"),
        (["names=ring", "seed=2"], "seed=2: random_matching or equidyn must be in names"),
        (["seed=-1"], "seed=-1: allowed"),
        (["plot=graphs.bmp"], "plot=graphs.bmp: allowed are names that end in .png, .pdf, .svg"),
        (["plot=/no/such/place/graphs.png"], "there is no directory /no/such/place"),
        (["plot=graphs.png", "num_models=65"], "allowed with num_models in 1..64, got 65"),
    ],
)
def test_a_wrong_argument_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert re.search(message, refusal(capsys, *arguments))


def test_nothing_to_draw_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "graphs.png"
    assert "nothing to draw" in refusal(capsys, "num_models=6", "names=hypercube", f"plot={path}", table=True)
    assert not path.exists()


def test_a_plot_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "graphs.png"
    path.mkdir()
    assert f"{path}: it is a directory" in refusal(capsys, "names=ring", f"plot={path}", table=True)
    assert list(tmp_path.iterdir()) == [path], "the unfinished file stayed"
