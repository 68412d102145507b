"""From a Plan to a finished run: checks, cache, directory, trainer, and how the end is told.

Whatever can be refused is refused before the run directory exists. From then on status.json says how the run
stands, whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from tiny_llm import files
from tiny_llm.config.placement import Placement
from tiny_llm.config.plan import Plan, settled
from tiny_llm.config.saved import plain, recipe_identity, to_yaml
from tiny_llm.config.validation import check_writable
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.loader import check_capacity
from tiny_llm.data.prepare import ensure_cache
from tiny_llm.decentralized.topology import make_topology
from tiny_llm.distributed.agreement import agreed, compare
from tiny_llm.distributed.ranks import Ranks, open_ranks
from tiny_llm.distributed.watch import RankLostError
from tiny_llm.interop.pretrained import Pretrained, check_vocabulary, open_pretrained
from tiny_llm.training.checkpoint import CheckpointError, State, load_state
from tiny_llm.training.device import prepare_torch, settle_runtime
from tiny_llm.training.environment import describe_environment, read_starts
from tiny_llm.training.loop import Trainer
from tiny_llm.training.progress import Progress
from tiny_llm.training.resume import Resume
from tiny_llm.training.run_directory import Rows, RunDirectory
from tiny_llm.training.sampling import show_sample
from tiny_llm.training.signals import Interrupted, StopSignals
from tiny_llm.training.tracking import open_tracker, require_package
from tiny_llm.training.worker_files import load_whole, newest_state


def run(
    plan: Plan, resume: Resume | None = None, placement: Placement | None = None, again: bool = False
) -> None:
    """Train, evaluate and write everything. Ends with SystemExit(128 + n) on a signal; raises UserError.

    placement: of this process among the run's ranks. again: an earlier attempt may have left its rows here, without a
    state to go on from; they are put aside.
    """
    placement = placement or Placement()
    if resume is None:
        config = settled(settle_runtime(plan), plan)
        plan = replace(plan, config=config)
    if placement.first:
        check_writable(plan.config.output_dir)
    require_package(plan.config.tracking)
    device = prepare_torch(plan.config, placement)
    mourn = functools.partial(_note_failure, RunDirectory(plan.config.output_dir), plan, placement)
    try:
        with open_ranks(placement, device, plan.config.runtime.timeout_seconds, mourn, Interrupted) as ranks:
            topology = make_topology(num_models=plan.num_models, **vars(plan.config.topology))
            _run(agreed(ranks, plan, topology), resume, ranks, device, again)
    except Interrupted as interrupted:
        raise SystemExit(128 + interrupted.number) from None


def _run(plan: Plan, resume: Resume | None, ranks: Ranks, device: torch.device, again: bool) -> None:
    directory = RunDirectory(plan.config.output_dir)
    initial = None
    if resume is None:
        if ranks.first and not again and directory.holds_run:
            with directory.locked():  # one that is alive is told apart from one that has ended
                directory.refuse_existing_run()
        if plan.config.init_from is not None:
            initial = open_pretrained(plan.config.init_from, plan.config.model)
    with ranks.first_alone():
        cache = ensure_cache(plan.config.data, plan.targets_needed, print if ranks.first else lambda _: None)
    compare(ranks, {"token cache": cache.identity})
    check_capacity(cache, plan.config.data, plan.config.model.context_length, plan.tokens)
    if initial is not None:
        check_vocabulary(initial.directory, cache.load_tokenizer(), "the corpus")
    with directory.locked() if ranks.first else contextlib.nullcontext():
        state = None
        if resume is not None:
            state = _open_state(resume, plan, directory, cache, ranks)
            if ranks.told((directory / "result.json").exists() and directory.status == "complete"):
                if ranks.first:
                    print(f"{directory.path} is complete; nothing is left to do")
                return
        if ranks.first:
            _prepare_directory(directory, resume, state, again)
            _write_head(directory, plan, device, cache, initial)
        with _status(directory, plan, ranks), StopSignals() as signals:
            _train(plan, directory, cache, device, signals, state, initial, ranks)


def _prepare_directory(
    directory: RunDirectory, resume: Resume | None, state: State | None, again: bool
) -> None:
    """Leave in a directory what the run that begins there adds to."""
    if resume is not None and state is not None:
        kept = {"metrics.jsonl": state["metrics_bytes"], "samples.jsonl": state.get("samples_bytes", 0)}
        directory.copy_history(RunDirectory(resume.directory), kept)
    elif again:
        directory.put_aside()
    else:
        directory.refuse_existing_run()


def _open_state(
    resume: Resume, plan: Plan, directory: RunDirectory, cache: TokenCache, ranks: Ranks
) -> State:
    """Return the state to go on from, checked against recipe, data and a newer state in the directory.

    The first rank reads and checks all of it; the others map its files and read their workers' rows when they need
    them.
    """
    path = Path(ranks.told(str(_checked_state(resume, directory)) if ranks.first else None))
    state = load_whole(path, verify=ranks.first)
    for what, here in (("recipe", recipe_identity(plan.config)), ("data", cache.identity)):
        if state["identity"][what] != here:
            raise CheckpointError(
                f"{path} belongs to another {what} ({state['identity'][what][:12]}, here {here[:12]}); "
                f"restore the {'resolved.yaml' if what == 'recipe' else 'token cache'} that it was made with"
            )
    return state


def _checked_state(resume: Resume, directory: RunDirectory) -> Path:
    """Return the file to go on from. Raises CheckpointError when the directory has a newer one."""
    newest = newest_state(resume.directory)
    path = resume.file or newest
    update = load_state(path, verify=False)["update"]
    same_place = directory.path.resolve() == resume.directory.resolve()
    if same_place and load_state(newest, verify=False)["update"] > update:
        raise CheckpointError(
            f"{newest} is newer than {path.name}; resume={resume.directory} continues from it, "
            "output_dir=... goes back to this state in another directory"
        )
    return path


def _write_head(
    directory: RunDirectory, plan: Plan, device: torch.device, cache: TokenCache, initial: Pretrained | None
) -> None:
    files.write_text(directory / "resolved.yaml", to_yaml(replace(plan.config, resume=None)))
    path = directory / "environment.json"
    starts = read_starts(path)
    if path.exists() and not starts:
        path.replace(directory / "environment.damaged.json")
    identities = {"recipe": recipe_identity(plan.config), "data": cache.identity}
    if initial is not None:
        identities["initial_weights"] = initial.identity()
    starts.append(describe_environment(plan.config, device, identities, plan.ranks))
    files.write_json(path, {"starts": starts})


@contextlib.contextmanager
def _status(directory: RunDirectory, plan: Plan, ranks: Ranks) -> Any:
    """Keep status.json true from start to end, however the end comes."""
    facts = {"updates": plan.updates}
    if ranks.first:
        directory.set_status("running", **facts)
    try:
        yield
    except Interrupted as interrupted:
        if ranks.first:
            directory.set_status("interrupted", signal=str(interrupted), **facts)
            print(f"interrupted by {interrupted}; continue with resume={directory.path}", file=sys.stderr)
        raise
    except BaseException as error:
        _note_failure(directory, plan, Placement(ranks.rank, ranks.world), error)
        raise
    if ranks.first:
        directory.set_status("complete", **facts)


def _note_failure(directory: RunDirectory, plan: Plan, placement: Placement, error: BaseException) -> None:
    """Write down that the run failed: the first rank does, or whoever misses it. Who wakes up late adds nothing."""
    lost = error.rank if isinstance(error, RankLostError) else None
    if (placement.first or lost == 0) and (lost is None or directory.status == "running"):
        with contextlib.suppress(OSError):  # on a full disk the error itself matters more
            directory.set_status("failed", error=f"{type(error).__name__}: {error}", updates=plan.updates)


def _train(
    plan: Plan,
    directory: RunDirectory,
    cache: TokenCache,
    device: torch.device,
    signals: StopSignals,
    state: State | None,
    initial: Pretrained | None,
    ranks: Ranks,
) -> None:
    """Train to the end, from a saved state, from given weights (the same for every worker) or from the seed's.

    What ranks but the first have to show or to write goes nowhere.
    """
    config = plan.config
    start = state["update"] if state else 0
    nowhere = Path(os.devnull)
    if ranks.first:
        (directory / "metrics.jsonl").touch()  # to be followed from the start
    metrics = Rows(directory / "metrics.jsonl" if ranks.first else nowhere)
    with (
        contextlib.closing(metrics),
        _patient(directory / "run.log" if ranks.first else nowhere) as log,
        open(nowhere, "w") as silence,
    ):
        screen = None if ranks.first else silence
        with Progress(plan.updates, plan.tokens, start, screen, log) as progress:
            tracker = open_tracker(
                config.tracking if ranks.first else "none",
                directory.path,
                plain(config),
                directory.path.name,
                start,
                warn=progress.say,
            )
            with contextlib.closing(tracker):
                trainer = Trainer(plan, directory, cache, device, metrics, tracker, signals, ranks)
                if state is not None:
                    trainer.restore(state)
                elif initial is not None:
                    trainer.engine.model.set_all(initial.weights)
                for line in _opening(plan, directory, device, trainer):
                    progress.say(line)
                result = trainer.train(progress)
        if config.sample_prompt is not None:
            weights = trainer.engine.average_weights()
            with ranks.first_alone():
                if ranks.first:
                    show_sample(config, weights, cache, config.sample_prompt, log)
    if ranks.first:
        loss = result["final_validation_loss"]
        print(f"final validation loss {loss:.4f}; everything is in {directory.path}")


@contextlib.contextmanager
def _patient(path: Path) -> Iterator[TextIO]:
    """Open a log that may lack its end: closing it writes what is left, which a full disk refuses."""
    file = open(path, "a")  # noqa: SIM115 - closed below
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _opening(plan: Plan, directory: RunDirectory, device: torch.device, trainer: Trainer) -> list[str]:
    """Return what was derived and decided, for a user to see before the first update."""
    config = plan.config
    workers = f"{plan.num_models} workers, {config.decentralized.scheme}, " if plan.num_models > 1 else ""
    ranks = f"{plan.ranks} ranks of " if plan.ranks > 1 else ""
    if plan.ranks > 1:
        workers += "data parallel, " if plan.data_parallel else f"{len(plan.workers(0))} a rank, "
    looped = ", looped" if trainer.engine.looped and plan.num_models > 1 else ""
    return [
        f"run        {directory.path}" + (f" (resumed at update {trainer.update})" if trainer.update else ""),
        f"model      {plan.parameters:,} parameters, context {config.model.context_length}"
        + (f", started from {config.init_from}" if config.init_from else ""),
        f"budget     {plan.updates:,} updates of {config.training.batch_tokens:,} targets = {plan.tokens:,} "
        f"in {len(plan.epoch_boundaries)} epochs",
        f"update     {workers}{plan.micro_batch_size} sequences x {plan.accumulation} micro-batches",
        f"device     {ranks}{device}, {torch.get_num_threads()} threads, {config.runtime.precision}, "
        f"{'compiled' if config.runtime.compile else 'eager'}{looped}",
        f"memory     {plan.memory_bytes / 2**20:,.0f} MiB estimated",
    ]
