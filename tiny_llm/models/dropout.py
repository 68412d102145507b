"""Which numbers decide what dropout drops: keys from the seed, the update, the micro-batch and the worker alone.

Places of a decoder, in order: the embeddings; then in each layer the attention weights and the results of
attention and MLP as they join the residual stream. A place's masks are a hash of its key (`operations.dropout`),
so executors, restarts and devices agree, and nothing random is kept in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiny_llm.config.schema import ModelConfig

DROPOUTS_A_LAYER = 3


def dropout_keys(
    model: ModelConfig, seed: int, update: int, micro_batch: int, workers: Sequence[int]
) -> Tensor:
    """Return the keys of one micro-batch, int32 [N, places, 2], for `workers` by their numbers in the run."""
    places = 1 + DROPOUTS_A_LAYER * model.layers
    keys_NPK = [
        np.random.SeedSequence([seed, update, micro_batch, worker]).generate_state(2 * places)
        for worker in workers
    ]
    return torch.from_numpy(np.stack(keys_NPK).astype(np.uint32).view(np.int32)).view(-1, places, 2)
