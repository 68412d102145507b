"""From a Plan to a finished run: checks, cache, directory, trainer, and how the end is told.

Whatever can be refused is refused before the run directory exists. From then on status.json says how the run
stands, whatever happens.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

import torch

from tiny_llm import files
from tiny_llm.config.plan import Plan, settled
from tiny_llm.config.saved import plain, recipe_identity, to_yaml
from tiny_llm.config.validation import check_writable
from tiny_llm.data.cache import TokenCache
from tiny_llm.data.loader import check_capacity
from tiny_llm.data.prepare import ensure_cache
from tiny_llm.data.tokenizer import load_tokenizer
from tiny_llm.interop.pretrained import Pretrained, check_vocabulary, open_pretrained
from tiny_llm.training.checkpoint import CheckpointError, State, load_state, newest_state
from tiny_llm.training.device import prepare_torch, settle_runtime
from tiny_llm.training.environment import describe_environment
from tiny_llm.training.loop import Trainer
from tiny_llm.training.progress import Progress
from tiny_llm.training.resume import Resume
from tiny_llm.training.run_directory import Metrics, RunDirectory
from tiny_llm.training.sampling import show_sample
from tiny_llm.training.signals import Interrupted, StopSignals
from tiny_llm.training.tracking import open_tracker, require_package
from tiny_llm.training.worker_files import load_whole


def run(plan: Plan, resume: Resume | None = None) -> None:
    """Train, evaluate and write everything. Ends with SystemExit(128 + n) on a signal; raises UserError."""
    if resume is None:
        config = settled(settle_runtime(plan), plan)
        plan = replace(plan, config=config)
    directory = RunDirectory(plan.config.output_dir)
    check_writable(plan.config.output_dir)
    require_package(plan.config.tracking)
    device = prepare_torch(plan.config)
    initial = None
    if resume is None:
        directory.refuse_existing_run()
        if plan.config.init_from is not None:
            initial = open_pretrained(plan.config.init_from, plan.config.model)
    cache = ensure_cache(plan.config.data, plan.tokens, print)
    check_capacity(cache, plan.config.data, plan.config.model.context_length, plan.tokens)
    if initial is not None:
        check_vocabulary(initial.directory, load_tokenizer(cache.directory), "the corpus")
    with directory.locked():
        state = None
        if resume is None:
            directory.refuse_existing_run()
        else:
            state = _open_state(resume, plan, directory, cache)
            if (directory / "result.json").exists() and directory.status == "complete":
                print(f"{directory.path} is complete; nothing is left to do")
                return
            kept = {"metrics.jsonl": state["metrics_bytes"], "samples.jsonl": state.get("samples_bytes", 0)}
            directory.copy_history(RunDirectory(resume.directory), kept)
        _write_head(directory, plan, device, cache, initial)
        with _status(directory, plan), StopSignals() as signals:
            _train(plan, directory, cache, device, signals, state, initial)


def _open_state(resume: Resume, plan: Plan, directory: RunDirectory, cache: TokenCache) -> State:
    """Return the state to go on from, checked against recipe, data and a newer state in the directory."""
    newest = newest_state(resume.directory)
    path = resume.file or newest
    state = load_whole(path)
    for what, here in (("recipe", recipe_identity(plan.config)), ("data", cache.identity)):
        if state["identity"][what] != here:
            raise CheckpointError(
                f"{path} belongs to another {what} ({state['identity'][what][:12]}, here {here[:12]}); "
                f"restore the {'resolved.yaml' if what == 'recipe' else 'token cache'} that it was made with"
            )
    same_place = directory.path.resolve() == resume.directory.resolve()
    if same_place and load_state(newest, verify=False)["update"] > state["update"]:
        raise CheckpointError(
            f"{newest} is newer than {path.name}; resume={resume.directory} continues from it, "
            "output_dir=... goes back to this state in another directory"
        )
    return state


def _write_head(
    directory: RunDirectory, plan: Plan, device: torch.device, cache: TokenCache, initial: Pretrained | None
) -> None:
    files.write_text(directory / "resolved.yaml", to_yaml(replace(plan.config, resume=None)))
    path = directory / "environment.json"
    starts = files.read_json(path)["starts"] if path.exists() else []
    identities = {"recipe": recipe_identity(plan.config), "data": cache.identity}
    if initial is not None:
        identities["initial_weights"] = initial.identity()
    starts.append(describe_environment(plan.config, device, identities))
    files.write_json(path, {"starts": starts})


@contextlib.contextmanager
def _status(directory: RunDirectory, plan: Plan) -> Any:
    """Keep status.json true from start to end, however the end comes."""
    facts = {"updates": plan.updates}
    directory.set_status("running", **facts)
    try:
        yield
    except Interrupted as interrupted:
        directory.set_status("interrupted", signal=str(interrupted), **facts)
        print(f"interrupted by {interrupted}; continue with resume={directory.path}", file=sys.stderr)
        raise SystemExit(128 + interrupted.number) from None
    except BaseException as error:
        with contextlib.suppress(OSError):  # on a full disk the error itself matters more
            directory.set_status("failed", error=f"{type(error).__name__}: {error}", **facts)
        raise
    directory.set_status("complete", **facts)


def _train(
    plan: Plan,
    directory: RunDirectory,
    cache: TokenCache,
    device: torch.device,
    signals: StopSignals,
    state: State | None,
    initial: Pretrained | None,
) -> None:
    """Train to the end, from a saved state, from given weights (the same for every worker) or from the seed's."""
    config = plan.config
    metrics = Metrics(directory)
    start = state["update"] if state else 0
    with contextlib.closing(metrics), open(directory / "run.log", "a") as log:
        with Progress(plan.updates, plan.tokens, start, log=log) as progress:
            name = directory.path.name
            tracker = open_tracker(
                config.tracking, directory.path, plain(config), name, start, warn=progress.say
            )
            with contextlib.closing(tracker):
                trainer = Trainer(plan, directory, cache, device, metrics, tracker, signals)
                if state is not None:
                    trainer.restore(state)
                elif initial is not None:
                    trainer.engine.model.set_all(initial.weights)
                for line in _opening(plan, directory, device, trainer):
                    progress.say(line)
                result = trainer.train(progress)
        if config.sample_prompt is not None:
            show_sample(config, trainer.engine.model.average_state_dict(), cache, config.sample_prompt, log)
    print(f"final validation loss {result['final_validation_loss']:.4f}; everything is in {directory.path}")


def _opening(plan: Plan, directory: RunDirectory, device: torch.device, trainer: Trainer) -> list[str]:
    """Return what was derived and decided, for a user to see before the first update."""
    config = plan.config
    workers = f"{plan.num_models} workers, {config.decentralized.scheme}, " if plan.num_models > 1 else ""
    looped = ", looped" if trainer.engine.looped and plan.num_models > 1 else ""
    return [
        f"run        {directory.path}" + (f" (resumed at update {trainer.update})" if trainer.update else ""),
        f"model      {plan.parameters:,} parameters, context {config.model.context_length}"
        + (f", started from {config.init_from}" if config.init_from else ""),
        f"budget     {plan.updates:,} updates of {config.training.batch_tokens:,} targets = {plan.tokens:,} "
        f"in {len(plan.epoch_boundaries)} epochs",
        f"update     {workers}{plan.micro_batch_size} sequences x {plan.accumulation} micro-batches",
        f"device     {device}, {torch.get_num_threads()} threads, {config.runtime.precision}, "
        f"{'compiled' if config.runtime.compile else 'eager'}{looped}",
        f"memory     {plan.memory_bytes / 2**20:,.0f} MiB estimated",
    ]
