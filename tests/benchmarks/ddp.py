"""torch's DistributedDataParallel around the product's own decoder and loss, to be as fast as on several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tiny_llm.benchmarks.machine import seconds_of
from tiny_llm.benchmarks.measurements import repeat, spread
from tiny_llm.benchmarks.processes import sent_bytes
from tiny_llm.config.compose import compose
from tiny_llm.config.placement import find_placement
from tiny_llm.config.plan import Plan, make_plan, settled
from tiny_llm.models.decoder import Decoder, loss_sums
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.device import compute_dtype, prepare_torch, settle_runtime


class MeanLoss(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.config = plan.config
        self.decoder = Decoder(plan.config.model)
        self.decoder.load_state_dict(initial_parameters(plan.config.model, plan.config.runtime.seed))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        parameters = dict(self.decoder.named_parameters())
        sums = loss_sums(self.config.model, parameters, tokens_BT, targets_BT, compute_dtype(self.config))
        return sums / targets_BT.numel()


def measure(name: str, overrides: list[str], windows: int, updates: int) -> dict[str, Any]:
    """Measure data parallel by torch on random rows of the same shape as the product's."""
    placement = find_placement()
    plan = make_plan(compose(overrides).config(), placement.world)
    config = settled(settle_runtime(plan), plan)
    plan = replace(plan, config=config)
    device = prepare_torch(config, placement)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(MeanLoss(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, weight_decay=0.1)
    shape = (plan.micro_batch_size, config.model.context_length + 1)

    def work() -> None:
        rows = torch.randint(0, config.data.vocab_size, shape)
        model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    work()
    rates, wire = [], []
    for _ in range(windows):
        dist.barrier()
        before = sent_bytes()
        seconds = seconds_of(lambda: repeat(updates, work), device)
        dist.barrier()
        rates.append(updates * config.training.batch_tokens / seconds)
        wire.append((sent_bytes() - before) / updates / placement.world)
    dist.destroy_process_group()
    return {
        "name": name,
        "num_models": 1,
        "ranks": placement.world,
        "precision": config.runtime.precision,
        "tokens_per_second": spread(rates),
        "communication_share": None,  # it hides in the backward pass
        "bytes_sent": spread(wire),
        "predicted_bytes_sent": None,
    }
