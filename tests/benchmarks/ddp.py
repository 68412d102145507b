"""torch's DistributedDataParallel around the product's own decoder and loss, to be as fast as on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tiny_llm.benchmarks.processes import Way
from tiny_llm.config.compose import compose
from tiny_llm.config.plan import Plan, make_plan, settled
from tiny_llm.distributed.ranks import Ranks
from tiny_llm.models.decoder import Decoder, loss_sums
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.training.device import compute_dtype, settle_runtime


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


@contextmanager
def open_way(overrides: list[str], ranks: Ranks) -> Iterator[Way]:
    """Open data parallel by torch on random rows of the same shape as the product's."""
    plan = make_plan(compose(overrides).config(), ranks.world)
    config = settled(settle_runtime(plan), plan)
    plan = replace(plan, config=config)
    model = DistributedDataParallel(MeanLoss(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, weight_decay=0.1)
    shape = (plan.micro_batch_size, config.model.context_length + 1)

    def update() -> None:
        rows = torch.randint(0, config.data.vocab_size, shape)
        model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield Way(plan, update)
