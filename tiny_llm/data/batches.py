"""From rows of tokens to what a model eats: inputs and targets as int64 tensors on its device.

The only file of this room that imports torch. On CUDA the rows are copied through pinned memory without
waiting; torch keeps the pinned memory until the copy is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiny_llm.config.plan import Plan


def own_rows(plan: Plan, rank: int) -> npt.NDArray[np.int64]:
    """Return which rows of a micro-batch of all ranks are those of `rank`.

    With N workers row k is worker k mod N's, wherever that worker is; data-parallel ranks take runs of rows.
    """
    rows = np.arange(plan.num_models * plan.micro_batch_size)  # of one rank, where data-parallel
    if plan.data_parallel:
        return rows + rank * plan.micro_batch_size
    workers = plan.workers(rank)
    return rows.reshape(-1, plan.num_models)[:, workers.start : workers.stop].ravel()


def micro_batch(
    rows: npt.NDArray[np.integer[Any]], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, int64 [rows, L] each, of rows [rows, L + 1]: targets are one token ahead."""
    tokens = torch.from_numpy(rows.astype(np.int64, copy=False))
    if torch.device(device).type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    else:
        tokens = tokens.to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
