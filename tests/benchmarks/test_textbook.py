"""The textbook Llama of the benchmarks computes what the product does: alone, under vmap and packed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import textbook
import torch
from torch import Tensor

from tiny_llm.models.decoder import loss_sums

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, one_thread, random_packed, small_config  # noqa: F401

WORKERS, SHAPE = 3, (2, 8)
MODEL = small_config(model={"layers": 2}).model
Losses = Callable[[dict[str, Tensor], Tensor, Tensor, torch.dtype], Tensor]


def product(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    return loss_sums(MODEL, parameters, tokens, targets, dtype) / targets[0].numel()


def packed(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    return textbook.mean_loss(MODEL, textbook.separated(parameters), tokens, targets, dtype)


def under_vmap(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    mapped = torch.func.vmap(textbook.mean_loss, in_dims=(None, 0, 0, 0, None))
    result: Tensor = mapped(MODEL, textbook.separated(parameters), tokens, targets, dtype)
    return result


def alone(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    rows = [{name: value[i] for name, value in parameters.items()} for i in range(WORKERS)]
    return torch.stack([packed(rows[i], tokens[i], targets[i], dtype) for i in range(WORKERS)])


def losses_and_gradients(way: Losses, master: torch.dtype, dtype: torch.dtype) -> list[Tensor]:
    """The losses [N] of three workers with weights and tokens of their own, then all gradients."""
    parameters = {
        name: value.detach().clone().requires_grad_()
        for name, value in random_packed(MODEL, WORKERS, master).packed().items()
    }
    tokens, targets = torch.randint(
        MODEL.vocab_size, (2, WORKERS, *SHAPE), generator=torch.Generator().manual_seed(0)
    )
    losses = way(parameters, tokens, targets, dtype)
    assert losses.shape == (WORKERS,)
    return [losses, *torch.autograd.grad(losses.sum(), list(parameters.values()))]


@pytest.mark.parametrize("way", [alone, under_vmap, packed])
def test_textbook_has_the_products_losses_and_gradients_to_1e_10_in_fp64(way: Losses) -> None:
    expected = losses_and_gradients(product, torch.float64, torch.float64)
    found = losses_and_gradients(way, torch.float64, torch.float64)
    for value, reference in zip(found, expected, strict=True):
        assert reference.norm() > 0
        assert apart(value, reference) < 1e-10


@pytest.mark.parametrize("way", [alone, under_vmap, packed])
def test_textbook_in_bf16_multiplies_in_bf16_and_stays_near(way: Losses) -> None:
    expected = losses_and_gradients(product, torch.float64, torch.float64)
    found = losses_and_gradients(way, torch.float32, torch.bfloat16)
    assert all(value.dtype == torch.float32 for value in found)
    for value, reference in zip(found, expected, strict=True):
        assert 1e-5 < apart(value, reference) < 0.05
