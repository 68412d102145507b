"""The model FLOPs of a target are those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny_llm.benchmarks.workload import flops_a_target
from tiny_llm.config.compose import compose
from tiny_llm.models.decoder import Decoder


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=tiny"],
        ["model=tiny", "model.tied=false"],
        ["model=tiny", "model.kv_heads=2", "model.head_dim=48"],
        ["model=gpt2-8x512", "model.layers=2"],
        ["model=qwen3-v1", "model.layers=2", "model.head_dim=64"],
    ],
    ids=" ".join,
)
def test_model_flops_are_those_of_the_matmuls_and_half_of_the_attention_square(overrides: list[str]) -> None:
    config = compose([*overrides, "model.context_length=64"]).config()
    model = config.model
    with torch.device("meta"):
        decoder, tokens = Decoder(model), torch.zeros(1, model.context_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        decoder(tokens).sum().backward()
    counted = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    matmuls = sum(number for name, number in counted.items() if name in ("aten.mm", "aten.addmm"))
    heads_width = model.heads * model.head_width
    attention = (
        12 * model.layers * heads_width * model.context_length / 2
    )  # q k^T and weights v, three times each
    assert flops_a_target(config) == matmuls / model.context_length + attention
