"""Other ways to train N local models, to be faster than: measured beside the product, never part of it.

`one after another` is N single models with torch.optim.AdamW; `vmap` runs torch.func.vmap over stacked parameters;
`textbook` packs with bmm, one AdamW a worker and the full logits. All use the product's decoder for the single
model, mix by a matrix product, and get the same batch in the same precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tiny_llm.benchmarks.machine import measure_windows
from tiny_llm.benchmarks.measurements import described, plan_of, repeat
from tiny_llm.config.plan import Plan, settled
from tiny_llm.models import attention
from tiny_llm.models import operations as op
from tiny_llm.models.decoder import hidden_states
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.device import compute_dtype, prepare_torch, settle_runtime

Parameters = dict[str, Tensor]


def mean_loss(
    plan: Plan, parameters: Parameters, tokens: Tensor, targets: Tensor, dtype: torch.dtype
) -> Tensor:
    """The plain loss: full logits, F.cross_entropy in fp32."""
    hidden = hidden_states(plan.config.model, parameters, tokens, dtype)
    logits = op.linear(hidden, parameters["embedding.weight"]).float()
    workers = logits.shape[:-3]
    losses = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(*workers, -1).mean(-1)


def fresh(plan: Plan) -> Parameters:
    return initial_parameters(plan.config.model, plan.config.runtime.seed)


class OneAfterAnother:
    """N single models, each with torch.optim.AdamW(fused=True) and clip_grad_norm_."""

    def __init__(self, plan: Plan, dtype: torch.dtype, compiled: bool) -> None:
        self.plan, self.dtype = plan, dtype
        self.models = [
            {k: v.requires_grad_() for k, v in fresh(plan).items()} for _ in range(plan.num_models)
        ]
        self.optimizers = [
            torch.optim.AdamW(model.values(), lr=1e-3, fused=True, weight_decay=0.1) for model in self.models
        ]
        self.loss = torch.compile(mean_loss, dynamic=False) if compiled else mean_loss
        self.seconds = {"compute": 0.0, "clip": 0.0, "adamw": 0.0}

    def update(self, tokens_NBT: Tensor, targets_NBT: Tensor) -> None:
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            started = time.perf_counter()
            self.loss(self.plan, model, tokens_NBT[i], targets_NBT[i], self.dtype).backward()
            computed = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(model.values(), 1.0)
            clipped = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            self.seconds["compute"] += computed - started
            self.seconds["clip"] += clipped - computed
            self.seconds["adamw"] += time.perf_counter() - clipped


class Packed:
    """Stacked parameters [N, ...] with bmm everywhere, full logits, one AdamW a worker, W as a matrix product."""

    def __init__(self, plan: Plan, dtype: torch.dtype, compiled: bool, vmap: bool = False) -> None:
        self.plan, self.dtype = plan, dtype
        workers = plan.num_models
        self.stacked = {
            k: v.expand(workers, *v.shape).clone().requires_grad_() for k, v in fresh(plan).items()
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
        single: Callable[..., Tensor] = mean_loss
        if vmap:
            single = torch.func.vmap(mean_loss, in_dims=(None, 0, 0, 0, None))
        self.loss = torch.compile(single, dynamic=False) if compiled else single
        self.mixing = torch.full((workers, workers), 1 / workers)

    def update(self, tokens_NBT: Tensor, targets_NBT: Tensor) -> None:
        self.loss(self.plan, self.stacked, tokens_NBT, targets_NBT, self.dtype).sum().backward()
        with torch.no_grad():
            for value in self.stacked.values():
                value.copy_((self.mixing @ value.flatten(1)).view_as(value))
        for row, optimizer in zip(self.rows, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(row, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


BASELINES: dict[str, Callable[[Plan, torch.dtype], Any]] = {
    "one after another": lambda plan, dtype: OneAfterAnother(plan, dtype, False),
    "one after another, compiled": lambda plan, dtype: OneAfterAnother(plan, dtype, True),
    "vmap": lambda plan, dtype: Packed(plan, dtype, False, vmap=True),
    "textbook packing": lambda plan, dtype: Packed(plan, dtype, False),
    "textbook packing, compiled": lambda plan, dtype: Packed(plan, dtype, True),
}


def measure(name: str, overrides: list[str], windows: int, updates: int) -> dict[str, Any]:
    """Measure one baseline on random rows of the same shape as the product's."""
    plan = plan_of([*overrides, "runtime.compile=false"])
    config = settled(settle_runtime(plan), plan)
    device, dtype = prepare_torch(config), compute_dtype(config)
    plan = Plan(config, plan.parameters, plan.epoch_boundaries, plan.micro_batch_size)
    attention.blocked_attention = attention.fused_attention  # torch's own: the product's kernel is not theirs
    way = BASELINES[name](plan, dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (plan.num_models, plan.micro_batch_size, config.model.context_length + 1)

    def work() -> None:
        rows = torch.randint(0, config.data.vocab_size, shape, generator=generator)
        way.update(rows[..., :-1].contiguous(), rows[..., 1:].contiguous())

    work()
    seconds_of_parts = getattr(way, "seconds", {})
    seconds_of_parts.update(dict.fromkeys(seconds_of_parts, 0.0))  # forget the warm-up
    measured = measure_windows(lambda: repeat(updates, work), windows, device, dtype)
    total = sum(seconds_of_parts.values())
    components = {part: seconds / total for part, seconds in seconds_of_parts.items()}
    return {**described(name, plan, measured, updates), "execution": name, "components": components}
