"""Other ways to train N local models, to be faster than: measured beside the product, never part of it.

Two kinds, all with the full logits, torch.optim.AdamW and the same batch in the same precision:

- what plain torch gives, with the Llama of textbook.py and torch as it comes: `vmap` runs torch.func.vmap over
  stacked parameters, `textbook packing` has the worker axis in every matmul. Nothing of the product is in them,
  so they stand still when it gets faster.
- the strong ones, with the product's decoder (but torch's attention) and its allocator settings: `one after
  another` is N single models, `vmap, our decoder` the same vmap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import textbook
import torch
from torch import Tensor
from torch.nn import functional

from tiny_llm.benchmarks.machine import measure_windows
from tiny_llm.benchmarks.measurements import described, plan_of, repeat
from tiny_llm.config.plan import Plan, settled
from tiny_llm.config.schema import Config, ModelConfig
from tiny_llm.models import attention
from tiny_llm.models import operations as op
from tiny_llm.models.decoder import head_weight, hidden_states
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.device import (
    compute_dtype,
    master_dtype,
    open_device,
    prepare_torch,
    settle_runtime,
)

Parameters = dict[str, Tensor]
Loss = Callable[[ModelConfig, Parameters, Tensor, Tensor, torch.dtype], Tensor]


def loss_of_our_decoder(
    model: ModelConfig, parameters: Parameters, tokens: Tensor, targets: Tensor, dtype: torch.dtype
) -> Tensor:
    """The plain loss on the product's hidden states: full logits, F.cross_entropy in the weights' dtype."""
    hidden = hidden_states(model, parameters, tokens, dtype)
    weight = head_weight(parameters)
    logits = op.linear(hidden, weight).to(weight.dtype)
    losses = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean((-2, -1))


def mapped(loss: Loss) -> Loss:
    """The loss of one model for stacked ones. On CPUs torch has no rule for its attention, and loops there."""
    return torch.func.vmap(loss, in_dims=(None, 0, 0, 0, None))


def fresh(plan: Plan) -> Parameters:
    """The product's initial weights, on the run's device."""
    config = plan.config
    place: dict[str, Any] = {"device": open_device(config.runtime.device), "dtype": master_dtype(config)}
    return {
        name: value.to(**place)
        for name, value in initial_parameters(config.model, config.runtime.seed).items()
    }


class OneAfterAnother:
    """N single models on the product's decoder, each with torch.optim.AdamW(fused=True) and clip_grad_norm_.

    The strong baseline: it has the fused projections and the fast norms of the product, so what it lacks is the
    product's loss, attention and update.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, compiled: bool = False) -> None:
        self.model, self.dtype = plan.config.model, dtype
        self.models = [
            {k: v.requires_grad_() for k, v in fresh(plan).items()} for _ in range(plan.num_models)
        ]
        self.optimizers = [
            torch.optim.AdamW(model.values(), lr=1e-3, fused=True, weight_decay=0.1) for model in self.models
        ]
        self.loss = torch.compile(loss_of_our_decoder, dynamic=False) if compiled else loss_of_our_decoder
        self.seconds = {"compute": 0.0, "clip": 0.0, "adamw": 0.0}

    def update(self, tokens_NBT: Tensor, targets_NBT: Tensor) -> None:
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            started = time.perf_counter()
            self.loss(self.model, model, tokens_NBT[i], targets_NBT[i], self.dtype).backward()
            computed = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(model.values(), 1.0)
            clipped = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            self.seconds["compute"] += computed - started
            self.seconds["clip"] += clipped - computed
            self.seconds["adamw"] += time.perf_counter() - clipped


class Packed:
    """Stacked parameters [N, ...] with a loss of their own, one AdamW a worker, W as a matrix product."""

    def __init__(self, plan: Plan, dtype: torch.dtype, parameters: Parameters, loss: Loss) -> None:
        self.model, self.dtype, self.loss = plan.config.model, dtype, loss
        workers = plan.num_models
        self.stacked = {
            k: v.expand(workers, *v.shape).clone().requires_grad_() for k, v in parameters.items()
        }
        for value in self.stacked.values():
            value.grad = torch.zeros_like(value)
        rows: list[list[Tensor]] = []
        for i in range(workers):
            row = [value.detach()[i].requires_grad_() for value in self.stacked.values()]
            for part, value in zip(row, self.stacked.values(), strict=True):
                assert value.grad is not None
                part.grad = value.grad[i]
            rows.append(row)
        self.rows = rows
        self.optimizers = [torch.optim.AdamW(row, lr=1e-3, fused=True, weight_decay=0.1) for row in rows]
        self.mixing = self.stacked["embedding.weight"].new_full((workers, workers), 1 / workers)

    def update(self, tokens_NBT: Tensor, targets_NBT: Tensor) -> None:
        self.loss(self.model, self.stacked, tokens_NBT, targets_NBT, self.dtype).sum().backward()
        with torch.no_grad():
            for value in self.stacked.values():
                value.copy_((self.mixing @ value.flatten(1)).view_as(value))
        for row, optimizer in zip(self.rows, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(row, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def packed_textbook(plan: Plan, dtype: torch.dtype, loss: Loss) -> Packed:
    return Packed(plan, dtype, textbook.separated(fresh(plan)), loss)


# What takes the place of the product's kernels, which are not theirs.
TORCHS_KERNELS = (
    (attention, "causal_attention", attention.plain_attention),
    (op, "fuses", lambda x: False),
)

Baseline = Callable[[Plan, torch.dtype], Any]
OUR_DECODER: dict[str, Baseline] = {
    "one after another": OneAfterAnother,
    "one after another, compiled": lambda plan, dtype: OneAfterAnother(plan, dtype, compiled=True),
    "vmap, our decoder": lambda plan, dtype: Packed(plan, dtype, fresh(plan), mapped(loss_of_our_decoder)),
}
TEXTBOOK: dict[str, Baseline] = {
    "vmap": lambda plan, dtype: packed_textbook(plan, dtype, mapped(textbook.mean_loss)),
    "textbook packing": lambda plan, dtype: packed_textbook(plan, dtype, textbook.mean_loss),
    "textbook packing, compiled": lambda plan, dtype: packed_textbook(
        plan, dtype, torch.compile(textbook.mean_loss, dynamic=False)
    ),
}
BASELINES = OUR_DECODER | TEXTBOOK


def left_out(model: ModelConfig) -> list[str]:
    """Return the baselines that do not compute the model."""
    return [] if textbook.is_llama(model) else list(TEXTBOOK)


def prepare(name: str, config: Config) -> torch.device:
    """Set this process up and return its device: as the product does, or with torch as it comes."""
    for place in TORCHS_KERNELS:
        setattr(*place)
    if name in OUR_DECODER:
        return prepare_torch(config)
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    return open_device(config.runtime.device)


def measure(name: str, overrides: list[str], windows: int, updates: int) -> dict[str, Any]:
    """Measure one baseline on random rows of the same shape as the product's.

    An update is one micro-batch: where the product would add up several, the rate counts this one alone.
    """
    plan = plan_of([*overrides, "runtime.compile=false"])
    config = settled(settle_runtime(plan), plan)
    plan = replace(plan, config=config)
    device, dtype = prepare(name, config), compute_dtype(config)
    way = BASELINES[name](plan, dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (plan.num_models, plan.micro_batch_size, config.model.context_length + 1)

    def work() -> None:
        rows = torch.randint(0, config.data.vocab_size, shape, generator=generator).to(device)
        way.update(rows[..., :-1].contiguous(), rows[..., 1:].contiguous())

    work()
    seconds_of_parts = getattr(way, "seconds", {})
    seconds_of_parts.update(dict.fromkeys(seconds_of_parts, 0.0))  # forget the warm-up
    measured = measure_windows(lambda: repeat(updates, work), windows, device, dtype)
    tokens = updates * plan.num_models * plan.micro_batch_size * config.model.context_length
    total = sum(seconds_of_parts.values())
    components = {part: seconds / total for part, seconds in seconds_of_parts.items()}
    return {**described(name, plan, measured, tokens), "execution": name, "components": components}
