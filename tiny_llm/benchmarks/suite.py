"""A benchmark from its arguments to its table: which measurements, each in a process of its own.

The baselines are other ways to train the same models. They live with the tests, are found in a checkout only,
and are measured on the same batch, precision and device as the product.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_llm import files
from tiny_llm.benchmarks.loading import load_file
from tiny_llm.benchmarks.table import print_results
from tiny_llm.config.compose import compose
from tiny_llm.config.errors import UserError
from tiny_llm.config.plan import make_plan
from tiny_llm.config.validation import check_writable

if TYPE_CHECKING:
    from tiny_llm.benchmark import BenchmarkArguments

Result = dict[str, Any]
Measurement = tuple[Path, str, tuple[Any, ...]]  # a file, a function in it, its arguments

PRODUCT = Path(__file__).with_name("measurements.py")
RANKS = Path(__file__).with_name("processes.py")
FUNCTIONS = {"loader": "loading", "evaluate": "evaluating", "startup": "starting", "sample": "sampling"}


def run_suite(arguments: BenchmarkArguments, overrides: list[str]) -> None:
    """Run one kind of benchmark, print its table and, with json=PATH, write its numbers."""
    overrides = [*_defaults(arguments), *overrides]
    make_plan(compose(overrides).config())  # refuse a mistake before anything is measured
    path = Path(arguments.json) if arguments.json is not None else None
    if path is not None:
        check_writable(str(path.parent), "json")
        if path.is_dir():
            raise UserError(f"json={path} is a directory; name a file")
    results: list[Result] = []
    for measurement in _measurements(arguments, overrides):
        for result in _in_own_process(measurement):
            results.append(result)
            print(f"measured {_in_short(result)}", flush=True)
    print_results(arguments.kind, overrides, results)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps({"overrides": overrides, "results": results}, indent=2) + "\n")


def _in_short(result: Result) -> str:
    """Return a result's name and, of training, what matters: all that is left of a suite that is cut short."""
    workers = f", N={result['num_models']}" if "num_models" in result else ""
    mode = ", compiled" if result.get("compile") else ""
    rate = result.get("tokens_per_second")
    return f"{result['name']}{mode}{workers}" + (f": {rate['median']:,.0f} tokens/s" if rate else "")


def _defaults(arguments: BenchmarkArguments) -> list[str]:
    """Return a run with a small global batch and a budget that no measurement uses up."""
    return [
        f"model.context_length={arguments.context_length}",
        f"training.batch_tokens={arguments.sequences * arguments.context_length}",
        "data.max_passes=1000000",
        "data.shard_tokens=1048576",
        "evaluation.subset_blocks=64",
        "evaluation.batch_size=16",
    ]


def _measurements(arguments: BenchmarkArguments, overrides: list[str]) -> Iterator[Measurement]:
    window, updates = arguments.windows, arguments.updates
    if arguments.kind == "packed":
        for number in arguments.num_models:
            yield from _packed(number, overrides, arguments)
    elif arguments.kind == "train":
        yield PRODUCT, "training", ("train", overrides, window, updates)
        if arguments.baselines:
            yield from _transformers_trainer(overrides, (window, updates))
    elif arguments.kind == "update":
        for number in arguments.num_models:
            yield PRODUCT, "update", ([*_workers(number), *overrides], window)
    elif arguments.kind == "processes":
        for number in arguments.num_models:
            yield from _processes(number, overrides, arguments)
    elif arguments.kind == "prepare":
        yield _in_tests("data/benchmark_prepare"), "measure", (window,)
    else:
        function = FUNCTIONS[arguments.kind]
        yield PRODUCT, function, (overrides, window)


def _packed(number: int, overrides: list[str], arguments: BenchmarkArguments) -> Iterator[Measurement]:
    size = (arguments.windows, arguments.updates)
    for execution in arguments.executions:
        words = [*_workers(number), *overrides, f"decentralized.execution={execution}"]
        yield PRODUCT, "training", (f"packed, {execution}", words, *size)
    baselines = _in_tests("benchmarks/baselines")
    if arguments.baselines and baselines.is_file():
        ways = load_file(baselines)
        left_out = ways.left_out(compose(overrides).config().model)
        if left_out:
            print(f"{'; '.join(left_out)} left out: the textbook's Llama does not compute this model")
        for name in ways.BASELINES:
            if name not in left_out:
                yield baselines, "measure", (name, [*_workers(number), *overrides], *size)


def _processes(number: int, overrides: list[str], arguments: BenchmarkArguments) -> Iterator[Measurement]:
    """Yield one packed process, then gossip and data parallel on several ranks, at the same global batch."""
    product, size = str(RANKS), (arguments.windows, arguments.updates)
    gossip = [
        (
            f"{scheme}, {topology}",
            product,
            [
                *overrides,
                f"decentralized={scheme}",
                f"decentralized.num_models={number}",
                f"topology={topology}",
            ],
        )
        for scheme in ("awc", "atc")
        for topology in arguments.topologies
    ]
    for _, _, words in gossip:  # refuse what cannot be composed or divided
        make_plan(compose(words).config(), arguments.ranks)
    yield RANKS, "on_ranks", (1, [("packed, awc", product, gossip[0][2])], *size)
    off = [*overrides, "decentralized=off"]
    ways = [*gossip, ("data parallel", product, off)]
    if arguments.baselines and (torch_ddp := _in_tests("benchmarks/ddp")).is_file():
        ways.append(("torch's DDP", str(torch_ddp), off))
    yield RANKS, "on_ranks", (arguments.ranks, ways, *size)


def _transformers_trainer(overrides: list[str], size: tuple[int, int]) -> Iterator[Measurement]:
    """Yield the Trainer of transformers, eager and compiled; say why where there is nothing to compare with."""
    trainer = _in_tests("benchmarks/transformers_trainer")
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"transformers Trainer left out: no {' and no '.join(missing)}; pip install 'tiny-llm[benchmark]'"
        )
    elif not trainer.is_file():
        print("transformers Trainer left out: it is measured from a checkout of the project only")
    elif compose(overrides).config().decentralized.scheme != "off":
        print("transformers Trainer left out: it trains one model, this run is decentralized")
    else:
        for compiled in ("false", "true"):
            words = [*overrides, f"runtime.compile={compiled}"]
            yield trainer, "measure", ("transformers Trainer", words, *size)


def _workers(number: int) -> list[str]:
    return ["decentralized=awc", f"decentralized.num_models={number}"]


def _in_tests(name: str) -> Path:
    return Path(__file__).resolve().parents[2] / "tests" / f"{name}.py"


def _in_own_process(measurement: Measurement) -> list[Result]:
    """Run a measurement in a fresh process, so that memory and compiled code are its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_measure, measurement).result()
        except KeyboardInterrupt:  # the pool would wait for the end of what it measures
            for child in multiprocessing.active_children():
                child.kill()
            raise


def _measure(measurement: Measurement) -> list[Result]:
    file, function, words = measurement
    found: Result | list[Result] = getattr(load_file(file), function)(*words)
    return found if isinstance(found, list) else [found]
