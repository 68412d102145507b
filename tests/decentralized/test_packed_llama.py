"""N models in one module: what every parameter and gradient shares memory with, whatever is done to the module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tiny_llm.models.decoder import Decoder
from tiny_llm.models.initialization import initial_parameters
from tiny_llm.packed import PackedAdamW, PackedLlama, local_mean_losses

sys.path.append(str(Path(__file__).parents[1]))
from reference.llama import reference_llama
from reference.small import apart, base_config, one_thread, random_packed, random_state  # noqa: F401

N = 3
MODEL = base_config().model


def rows(seed: int = 0, workers: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(MODEL.vocab_size, (2, workers, 2, 8), generator=generator)
    targets[0, 0, :5] = -100
    return tokens, targets


def assert_aliases(model: PackedLlama) -> None:
    """Every way to reach a weight or gradient ends in the two arenas, at the entry's place."""
    parameters, gradients = model.parameter_storage, model.gradient_storage
    assert parameters.shape == gradients.shape == (model.num_models, model.layout.size)
    assert parameters.is_contiguous()
    assert gradients.is_contiguous()
    assert parameters.dtype == gradients.dtype
    named = dict(model.named_parameters())
    assert named.keys() == {entry.name for entry in model.layout.entries}
    for entry in model.layout.entries:
        packed = model.packed()[entry.name]
        assert packed is named[entry.name], "what the executors run is what the module has"
        assert packed.shape == (model.num_models, *entry.shape)
        for i in range(model.num_models):
            here, there = parameters[i, entry.start :].data_ptr(), gradients[i, entry.start :].data_ptr()
            worker = model.worker(i)[entry.name]
            assert packed[i].data_ptr() == worker.data_ptr() == here
            assert model.local_state_dict(i)[entry.name].data_ptr() == here
            assert worker.shape == entry.shape
            for tensor in (packed, worker):
                assert tensor.dtype == parameters.dtype
                assert tensor.requires_grad
                assert tensor.is_leaf
                assert tensor.grad is not None
                assert tensor.grad.shape == tensor.shape
            assert packed.grad is not None
            assert worker.grad is not None
            assert packed.grad[i].data_ptr() == worker.grad.data_ptr() == there


def assert_works(model: PackedLlama) -> None:
    """Backward passes of both executors fill the gradient arena, and a step moves what the forward pass reads."""
    assert_aliases(model)
    tokens, targets = rows(workers=model.num_models)
    model.zero_gradients_()
    losses = local_mean_losses(model, tokens, targets)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert model.gradient_norms().min() > 0
    assert_aliases(model)
    PackedAdamW(model, base_config().optimizer).step(0.01)
    with torch.no_grad():
        assert (local_mean_losses(model, tokens, targets) < losses).all()


MOVES: dict[str, tuple[Callable[[PackedLlama], nn.Module], torch.dtype]] = {
    "nothing": (lambda model: model, torch.float32),
    "to fp64": (lambda model: model.to(torch.float64), torch.float64),
    "to bf16": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda model: model.half(), torch.float16),
    "double and back": (lambda model: model.double().float(), torch.float32),
    "cpu": (lambda model: model.cpu(), torch.float32),
    "to the same": (lambda model: model.to("cpu", torch.float32), torch.float32),
    "inside a parent": (lambda model: nn.Sequential(model).to(torch.float64)[0], torch.float64),
}


@pytest.mark.parametrize(("move", "dtype"), MOVES.values(), ids=MOVES.keys())
def test_parameters_and_gradients_are_views_of_their_arenas_before_and_after_a_move(
    move: Callable[[PackedLlama], PackedLlama], dtype: torch.dtype
) -> None:
    model = random_packed(MODEL, N, torch.float32)
    model.gradient_storage.normal_()
    weights, gradients = model.parameter_storage.clone(), model.gradient_storage.clone()
    assert_aliases(model)
    assert move(model) is model
    assert_aliases(model)
    assert model.parameter_storage.dtype == dtype
    assert torch.equal(model.parameter_storage, weights.to(dtype))
    assert torch.equal(model.gradient_storage, gradients.to(dtype))
    if dtype in (torch.float32, torch.float64):
        assert_works(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_move_to_a_gpu_and_back_keeps_the_views() -> None:
    model = random_packed(MODEL, N, torch.float32)
    weights = model.parameter_storage.clone()
    model.to("cuda")
    assert model.parameter_storage.is_cuda
    assert_aliases(model)
    model.to("cpu")
    assert torch.equal(model.parameter_storage, weights)
    assert_works(model)


def test_a_deep_copy_has_arenas_of_its_own_that_its_parameters_are_views_of() -> None:
    model = random_packed(MODEL, N, torch.float32)
    model.gradient_storage.normal_()
    weights = model.parameter_storage.clone()
    twin = copy.deepcopy(model)
    assert torch.equal(twin.parameter_storage, weights)
    assert twin.parameter_storage.data_ptr() != model.parameter_storage.data_ptr()
    assert twin.gradient_storage.data_ptr() != model.gradient_storage.data_ptr()
    assert_aliases(twin)
    assert_works(twin)
    assert torch.equal(model.parameter_storage, weights)
    assert_aliases(model)


# state


def test_a_state_goes_round_and_is_copied_into_the_arena() -> None:
    model, other = random_packed(MODEL, N, torch.float32), PackedLlama(MODEL, N, seed=9)
    state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        entry.name: (N, *entry.shape) for entry in model.layout.entries
    }
    address = other.parameter_storage.data_ptr()
    result = other.load_state_dict({name: value.clone() for name, value in state.items()})
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert other.parameter_storage.data_ptr() == address
    assert torch.equal(other.parameter_storage, model.parameter_storage)
    for i in range(N):
        for name, value in other.worker(i).items():
            assert torch.equal(value, state[name][i])
    assert_works(other)


def test_loading_keeps_an_optimizer_at_work() -> None:
    model = random_packed(MODEL, N, torch.float32)
    optimizer = PackedAdamW(model, base_config().optimizer)
    model.load_state_dict({name: value.clone() * 2 for name, value in model.state_dict().items()})
    model.gradient_storage.fill_(0.0)
    optimizer.step()
    assert optimizer.updates == 1


def test_assign_is_refused_and_changes_nothing() -> None:
    model = random_packed(MODEL, N, torch.float32)
    before = model.parameter_storage.clone()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="assign"):
        model.load_state_dict(state, assign=True)
    assert torch.equal(model.parameter_storage, before)
    assert_aliases(model)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_a_state_that_does_not_fit_is_refused(change: str) -> None:
    model = random_packed(MODEL, N, torch.float32)
    state = dict(model.state_dict())
    if change == "missing":
        del state["norm.weight"]
    elif change == "unexpected":
        state["head.weight"] = torch.zeros(N, 2)
    else:
        state["norm.weight"] = torch.zeros(N + 1, MODEL.width)
    with pytest.raises(RuntimeError, match=r"norm\.weight|head\.weight"):
        model.load_state_dict(state)
    assert_aliases(model)


def test_a_local_state_loads_into_the_single_model_and_gives_its_logits() -> None:
    model = random_packed(MODEL, N, torch.float64)
    tokens, _ = rows()
    logits = model(tokens)
    assert logits.shape == (N, 2, 8, MODEL.vocab_size)
    for i in range(N):
        state = model.local_state_dict(i)
        single = Decoder(MODEL, torch.float64)
        single.load_state_dict(state, strict=True)
        assert apart(single(tokens[i]), logits[i]) < 1e-12
        assert apart(reference_llama(MODEL, state, torch.float64)(tokens[i]), logits[i]) < 1e-12
        for name, value in random_state(MODEL, i).items():
            assert torch.equal(state[name], value)
            assert not state[name].requires_grad


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_the_average_is_taken_in_fp32_at_least_and_owns_its_memory(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    model = random_packed(MODEL, N, torch.float32).to(dtype)
    before = model.parameter_storage.clone()
    average = model.average_state_dict()
    Decoder(MODEL, wide).load_state_dict(average, strict=True)
    for name, value in average.items():
        expected = torch.stack([model.local_state_dict(i)[name].double() for i in range(N)]).mean(0)
        assert value.dtype == wide
        assert not value.requires_grad
        assert apart(value, expected) < (1e-15 if wide == torch.float64 else 1e-7), name
        value.zero_()
    assert torch.equal(model.parameter_storage, before)


def test_the_average_of_one_worker_is_that_worker() -> None:
    model = random_packed(MODEL, 1, torch.float32)
    for name, value in model.average_state_dict().items():
        assert torch.equal(value, model.local_state_dict(0)[name])


# gradients


def test_losses_are_means_over_each_workers_own_valid_targets() -> None:
    model = random_packed(MODEL, N, torch.float64)
    tokens, targets = rows()
    targets[1] = -100
    losses = local_mean_losses(model, tokens, targets)
    assert losses.shape == (N,)
    for i in (0, 2):
        expected = reference_llama(MODEL, random_state(MODEL, i), torch.float64).loss(tokens[i], targets[i])
        assert losses[i].item() == pytest.approx(expected.item(), rel=1e-12)
    assert losses[1].item() == 0.0, "a worker without a valid target has no loss, and divides by nothing"
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert model.gradient_norms()[1].item() == 0.0
    assert model.gradient_norms().isfinite().all()


def test_a_workers_backward_pass_fills_its_own_row_and_adds_to_what_is_there() -> None:
    model = random_packed(MODEL, N, torch.float64)
    tokens, targets = rows()
    local_mean_losses(model, tokens, targets).sum().backward()  # type: ignore[no-untyped-call]
    packed = model.gradient_storage.clone()
    model.zero_gradients_()
    assert not model.gradient_storage.any()
    for times in (1, 2):
        reference = reference_llama(MODEL, model.local_state_dict(1), torch.float64)
        single = Decoder(MODEL, torch.float64)
        logits = torch.func.functional_call(single, model.worker(1), (tokens[1],))
        valid = targets[1] != -100
        nn.functional.cross_entropy(logits[valid], targets[1][valid]).backward()  # type: ignore[no-untyped-call]
        assert apart(model.gradient_storage[1], times * packed[1]) < 1e-12
        assert not model.gradient_storage[[0, 2]].any()
        reference.loss(tokens[1], targets[1]).backward()  # type: ignore[no-untyped-call]
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            view = model.layout.views(model.gradient_storage[1])[name]
            assert apart(view, times * parameter.grad) < 1e-12


def test_one_workers_data_reaches_no_other_workers_gradient() -> None:
    model = random_packed(MODEL, N, torch.float64)
    tokens, targets = rows()
    gradients = []
    for shift in (0, 1):
        changed = tokens.clone()
        changed[1] = (changed[1] + shift) % MODEL.vocab_size
        model.zero_gradients_()
        local_mean_losses(model, changed, targets).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(model.gradient_storage.clone())
    assert torch.equal(gradients[0][[0, 2]], gradients[1][[0, 2]])
    assert not torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_zeroes_the_arena_and_keeps_gradients_in_it(set_to_none: bool) -> None:
    """torch's habit model.zero_grad() must not make the next step use stale gradients."""
    model = random_packed(MODEL, N, torch.float64)
    tokens, targets = rows()
    local_mean_losses(model, tokens, targets).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none)
    assert not model.gradient_storage.any()
    assert_works(model)


def test_every_worker_starts_at_the_single_models_weights() -> None:
    model, expected = PackedLlama(MODEL, N, seed=5), initial_parameters(MODEL, 5)
    for i in range(N):
        assert all(torch.equal(value, expected[name]) for name, value in model.local_state_dict(i).items())
    assert_works(model)
