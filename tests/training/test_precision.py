"""Training in bf16 learns what training in fp32 learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import rows_of, train

from tiny_llm.training.device import multiplies_bf16_fast


@pytest.mark.skipif(
    not multiplies_bf16_fast(torch.device("cpu")), reason="bf16 is slow on a CPU without AVX512-BF16"
)
def test_losses_of_bf16_stay_within_002_nats_of_fp32_over_200_updates(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        train(
            *tiny_overrides,
            f"runtime.precision={precision}",
            f"output_dir={tmp_path}/{precision}",
            "training.tokens_per_parameter=null",
            "training.updates=200",
            "training.epoch_tokens_per_parameter=null",
            "training.epoch_updates=100",
            "training.log_every=1",
            "training.checkpoint_policy=none",
        )
        rows = rows_of(tmp_path / precision)
        losses[precision] = [row["loss"] for row in rows if row["event"] == "train"]
    assert len(losses["fp32"]) == len(losses["bf16"]) == 200
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.5, "it must learn for the curves to say something"
    assert losses["fp32"] != losses["bf16"]
    apart = [abs(a - b) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)]
    assert max(apart) < 0.02
