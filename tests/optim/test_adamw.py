"""PackedAdamW against one torch.optim.AdamW a worker, with torch's own clipping."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tiny_llm.config.schema import OptimizerConfig
from tiny_llm.decentralized.topology import make_topology
from tiny_llm.packed import PackedAdamW, PackedLlama, local_mean_losses

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, base_config, one_thread, random_packed  # noqa: F401

N = 3
MODEL = base_config().model
SETTINGS = OptimizerConfig(lr=0.01, beta1=0.9, beta2=0.97, eps=1e-8, weight_decay=0.2, grad_clip=1.0)
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"]
)


def fill_gradients(model: PackedLlama, seed: int, lengths: list[float]) -> None:
    """Give worker i a random gradient of length lengths[i], zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    model.zero_gradients_()
    for i, length in enumerate(lengths):
        for view in model.layout.views(model.gradient_storage[i]).values():
            view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
        model.gradient_storage[i] *= length / model.gradient_storage[i].norm()


class SeparateOptimizers:
    """For each worker its own parameters and its own torch.optim.AdamW."""

    def __init__(self, model: PackedLlama, settings: OptimizerConfig) -> None:
        self.settings, decay = settings, settings.weight_decay
        self.parameters = [
            {n: nn.Parameter(v.clone()) for n, v in model.local_state_dict(i).items()}
            for i in range(model.num_models)
        ]
        self.optimizers = [
            torch.optim.AdamW(
                [
                    {"params": [p for p in own.values() if p.dim() == 2], "weight_decay": decay},
                    {"params": [p for p in own.values() if p.dim() == 1], "weight_decay": 0.0},
                ],
                lr=settings.lr,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                foreach=False,
                fused=False,
            )
            for own in self.parameters
        ]

    def step(self, model: PackedLlama, lr: float) -> None:
        """Step with the gradients that lie in the model's arena."""
        for i, (own, optimizer) in enumerate(zip(self.parameters, self.optimizers, strict=True)):
            for name, gradient in model.layout.views(model.gradient_storage[i]).items():
                own[name].grad = gradient.clone()
            if self.settings.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_(own.values(), self.settings.grad_clip, foreach=False)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()


def assert_equal(
    model: PackedLlama, optimizer: PackedAdamW, separate: SeparateOptimizers, tolerance: float
) -> None:
    for i in range(model.num_models):
        weights = model.local_state_dict(i)
        first = model.layout.views(optimizer.first_moment_storage[i])
        second = model.layout.views(optimizer.second_moment_storage[i])
        for name, parameter in separate.parameters[i].items():
            state = separate.optimizers[i].state[parameter]
            assert apart(weights[name], parameter) < tolerance, (i, name)
            assert apart(first[name], state["exp_avg"]) < tolerance, (i, name)
            assert apart(second[name], state["exp_avg_sq"]) < tolerance, (i, name)


@PRECISIONS
@pytest.mark.parametrize("grad_clip", [None, 1.0, 0.03])
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_every_worker_moves_as_with_an_adamw_of_its_own(
    dtype: torch.dtype, tolerance: float, grad_clip: float | None, weight_decay: float, eps: float
) -> None:
    settings = replace(SETTINGS, grad_clip=grad_clip, weight_decay=weight_decay, eps=eps)
    model = random_packed(MODEL, N, dtype)
    optimizer, separate = PackedAdamW(model, settings), SeparateOptimizers(model, settings)
    for r in range(12):
        lr = 0.01 * (r + 1) / 12 if r < 11 else 0.0
        fill_gradients(model, seed=r, lengths=[0.01 * (r + 1), 0.9 + 0.05 * r, 40.0 / (r + 1)])
        separate.step(model, lr)
        optimizer.step(lr)
    assert_equal(model, optimizer, separate, tolerance)


@pytest.mark.parametrize("grad_clip", [None, 0.5])
def test_bf16_storage_is_trained_and_clipped_too(grad_clip: float | None) -> None:
    settings = replace(SETTINGS, grad_clip=grad_clip, eps=1e-6)
    model = random_packed(MODEL, N, torch.float32)
    model.to(torch.bfloat16)
    optimizer, separate = PackedAdamW(model, settings), SeparateOptimizers(model, settings)
    for r in range(3):
        fill_gradients(model, seed=r, lengths=[0.4, 3.0, 20.0])
        separate.step(model, 0.01)
        optimizer.step(0.01)
    assert_equal(model, optimizer, separate, 0.02)


@PRECISIONS
def test_the_rate_defaults_to_the_configs_and_norms_may_be_given(
    dtype: torch.dtype, tolerance: float
) -> None:
    model = random_packed(MODEL, N, dtype)
    optimizer, separate = PackedAdamW(model, SETTINGS), SeparateOptimizers(model, SETTINGS)
    for r in range(2):
        fill_gradients(model, seed=r, lengths=[0.5, 3.0, 100.0])
        separate.step(model, SETTINGS.lr)
        optimizer.step(norms=None if r == 0 else model.gradient_norms())
    assert_equal(model, optimizer, separate, tolerance)


def test_a_gradient_at_the_threshold_is_scaled_with_eps_as_torch_does() -> None:
    """norm 1 and threshold 1 gives 1 / (1 + 1e-6), not 1: the first moment shows it."""
    model = random_packed(MODEL, 1, torch.float64)
    optimizer = PackedAdamW(model, SETTINGS)
    fill_gradients(model, seed=0, lengths=[1.0])
    gradient = model.gradient_storage.clone()
    optimizer.step()
    assert apart(optimizer.first_moment_storage, gradient * 0.1 / (1 + 1e-6)) < 1e-12


def test_the_first_update_moves_by_the_rate_against_the_sign() -> None:
    model = random_packed(MODEL, N, torch.float64)
    optimizer = PackedAdamW(model, replace(SETTINGS, weight_decay=0.0, grad_clip=None))
    fill_gradients(model, seed=0, lengths=[1.0, 30.0, 900.0])
    before, gradient = model.parameter_storage.clone(), model.gradient_storage.clone()
    optimizer.step(0.01)
    large = gradient.abs() > 1e-4
    moved = (before - model.parameter_storage)[large]
    torch.testing.assert_close(moved, 0.01 * gradient.sign()[large], rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_only_matrices_decay(dtype: torch.dtype) -> None:
    model = random_packed(MODEL, N, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    PackedAdamW(model, replace(SETTINGS, weight_decay=0.5)).step(0.1)
    for name, value in model.state_dict().items():
        if value.dim() == 2:  # a norm, with the workers in front
            assert torch.equal(value, before[name]), name
        else:
            torch.testing.assert_close(value, before[name] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("grad_clip", [None, 0.1])
def test_padding_stays_zero_for_ever(grad_clip: float | None) -> None:
    model = random_packed(MODEL, N, torch.float32)
    optimizer = PackedAdamW(model, replace(SETTINGS, weight_decay=0.5, grad_clip=grad_clip))
    arenas = {
        "parameters": model.parameter_storage,
        "gradients": model.gradient_storage,
        "first moments": optimizer.first_moment_storage,
        "second moments": optimizer.second_moment_storage,
    }
    padding = torch.ones(model.layout.size, dtype=torch.bool)
    for entry in model.layout.entries:
        padding[entry.start : entry.start + entry.numel] = False
    assert padding.any()
    generator = torch.Generator().manual_seed(0)
    for r in range(20):
        tokens = torch.randint(MODEL.vocab_size, (N, 1, 4), generator=generator)
        model.zero_gradients_()
        local_mean_losses(model, tokens, tokens).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.mix_(make_topology("ring", N), r, gamma=0.7)
        for name, arena in arenas.items():
            assert not arena[:, padding].any(), (r, name)
    for name, arena in arenas.items():
        assert arena[:, ~padding].ne(0).float().mean() > 0.9, f"{name} are all zero anyway"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_huge_gradient_is_clipped_alone(dtype: torch.dtype) -> None:
    """The other workers' bits do not depend on it."""
    after = []
    for length in (0.5, 1e6):
        model = random_packed(MODEL, N, dtype)
        optimizer = PackedAdamW(model, SETTINGS)
        fill_gradients(model, seed=0, lengths=[0.5, length, 2.0])
        optimizer.step()
        after.append(
            (model.parameter_storage, optimizer.first_moment_storage, optimizer.second_moment_storage)
        )
    for small, huge in zip(*after, strict=True):
        for other in (0, 2):
            assert torch.equal(small[other], huge[other])
    lengths = after[1][1].norm(dim=1) / (1 - SETTINGS.beta1)
    assert lengths.tolist() == pytest.approx([0.5, 1.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_a_threshold_nothing_is_scaled(dtype: torch.dtype) -> None:
    model = random_packed(MODEL, N, dtype)
    optimizer = PackedAdamW(model, replace(SETTINGS, grad_clip=None))
    fill_gradients(model, seed=0, lengths=[0.5, 7.0, 1e5])
    optimizer.step()
    lengths = optimizer.first_moment_storage.norm(dim=1) / (1 - SETTINGS.beta1)
    assert lengths.tolist() == pytest.approx([0.5, 7.0, 1e5], rel=1e-5)


def test_gradient_norms_are_each_workers_own() -> None:
    model = random_packed(MODEL, N, torch.float64)
    fill_gradients(model, seed=0, lengths=[0.5, 7.0, 1e5])
    assert model.gradient_norms().tolist() == pytest.approx([0.5, 7.0, 1e5], rel=1e-12)
    total = sum(
        float(x) ** 2 for v in model.layout.views(model.gradient_storage[1]).values() for x in v.flatten()
    )
    assert model.gradient_norms()[1].item() == pytest.approx(math.sqrt(total), rel=1e-12)


def test_the_norm_of_many_gradients_is_as_exact_as_of_few() -> None:
    """A running fp32 sum of squares is 0.02 % short after 5M of them, and more with every further one."""
    model = random_packed(replace(MODEL, vocab_size=300_000), 1, torch.float32)
    model.gradient_storage.normal_(generator=torch.Generator().manual_seed(0))
    assert model.gradient_storage.numel() > 2**22
    expected = torch.linalg.vector_norm(model.gradient_storage.double(), dim=1)
    torch.testing.assert_close(model.gradient_norms().double(), expected, rtol=2e-7, atol=0)


def test_an_optimizer_built_before_a_move_says_so_and_changes_nothing() -> None:
    model = random_packed(MODEL, N, torch.float32)
    optimizer = PackedAdamW(model, SETTINGS)
    model.to(torch.float64)
    fill_gradients(model, seed=0, lengths=[1.0] * N)
    before = model.parameter_storage.clone()
    with pytest.raises(RuntimeError, match=r"build PackedAdamW after \.to"):
        optimizer.step()
    assert torch.equal(model.parameter_storage, before)
    assert optimizer.updates == 0
    PackedAdamW(model, SETTINGS).step()
    assert not torch.equal(model.parameter_storage, before)


def test_a_move_to_where_the_model_is_keeps_the_optimizer() -> None:
    model = random_packed(MODEL, N, torch.float32)
    optimizer = PackedAdamW(model, SETTINGS)
    model.to("cpu", torch.float32)
    fill_gradients(model, seed=0, lengths=[1.0] * N)
    optimizer.step()
    assert optimizer.updates == 1


def test_moments_lie_as_the_parameters_do() -> None:
    model = random_packed(MODEL, N, torch.float32)
    optimizer = PackedAdamW(model, SETTINGS)
    for moments in (optimizer.first_moment_storage, optimizer.second_moment_storage):
        assert moments.shape == model.parameter_storage.shape == (N, model.layout.size)
        assert moments.dtype == torch.float32
        assert not moments.any()
