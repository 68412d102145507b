"""Micro-batches: targets are the inputs one token later, as int64 on the model's device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny_llm.data.batches import micro_batch


@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_targets_are_one_token_ahead(dtype: type) -> None:
    rows = np.arange(60000, 60012, dtype=dtype).reshape(3, 4)
    inputs, targets = micro_batch(rows, "cpu")
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == rows[:, :-1].tolist()
    assert targets.tolist() == rows[:, 1:].tolist()
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_reach_a_gpu_unchanged() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):  # many in flight: pinned memory must not be used again too early
        rows = generator.integers(0, 65536, (64, 1025))
        inputs, targets = micro_batch(rows, "cuda")
        assert (inputs.cpu().numpy() == rows[:, :-1]).all()
        assert (targets.cpu().numpy() == rows[:, 1:]).all()
