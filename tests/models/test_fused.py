"""What is written by hand for CPUs computes what autograd finds for the plain formulas."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import attention, cpu_attention, fused
from tiny_llm.models import operations as op
from tiny_llm.models.attention import fused_attention
from tiny_llm.models.cpu_attention import causal_attention
from tiny_llm.models.decoder import decoder_block, loss_sums

sys.path.append(str(Path(__file__).parents[1]))
from reference.small import apart, one_thread, random_state  # noqa: F401

N, B, T, D, V = 3, 2, 7, 12, 23
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
by_precision = pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_gradients(work: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradient of each input under an upstream gradient that depends on the place."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    result = work(*leaves)
    upstream = randn(*result.shape, seed=99, dtype=result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


def assert_equals_the_plain(
    work: Callable[..., Tensor], inputs: list[Tensor], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the plain formula in fp64, from the same inputs; dtypes must be as the plain formula's."""
    found = with_gradients(work, *inputs)
    monkeypatch.setattr(op, "fuses", lambda x: False)
    plain, exact = (with_gradients(work, *given) for given in (inputs, [part.double() for part in inputs]))
    for ours, theirs, expected in zip(found, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == expected.shape
        assert apart(ours, expected) < tolerance


@by_precision
@pytest.mark.parametrize("workers", [(), (N,)])
def test_rms_norm(
    workers: tuple[int, ...], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = torch.promote_types(dtype, torch.float32)
    inputs = [randn(*workers, B, T, D, seed=0, dtype=dtype), randn(*workers, D, seed=1, dtype=master)]
    assert_equals_the_plain(lambda x, w: op.rms_norm(x, w, 0.1), inputs, tolerance, monkeypatch)


@pytest.mark.parametrize("master", [torch.float64, torch.bfloat16])
def test_rms_norm_with_a_weight_of_any_dtype(master: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [randn(B, T, D, seed=0, dtype=torch.bfloat16), randn(D, seed=1, dtype=master)]
    assert_equals_the_plain(lambda x, w: op.rms_norm(x, w, 0.1), inputs, 6e-3, monkeypatch)


def test_the_norms_weight_gradient_adds_up_many_rows_in_fp32() -> None:
    """In bf16 a sum stands still once it is 256 times what is added to it."""
    x, weight = randn(4096, D, seed=0, dtype=torch.bfloat16), randn(D, seed=1, dtype=torch.float32)
    upstream = x.sign() * randn(4096, D, seed=2, dtype=torch.bfloat16).abs()
    sums = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = weight.to(torch.promote_types(dtype, torch.float32)).clone().requires_grad_()
        op.rms_norm(x.to(dtype), leaf, 1e-5).backward(upstream.to(dtype))  # type: ignore[no-untyped-call]
        sums.append(leaf.grad)
    assert apart(*sums) < 1e-5


@by_precision
def test_swiglu(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = randn(N, B, T, 2 * D, seed=0, dtype=dtype)
    assert_equals_the_plain(op.swiglu, [gate_up], 2 * tolerance, monkeypatch)


def test_gradcheck() -> None:
    x, weight = randn(2, 3, 4, seed=0).requires_grad_(), randn(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(op.swiglu, (x,))
    assert torch.autograd.gradcheck(lambda x, w: op.rms_norm(x, w, 0.1), (x, weight))


@pytest.mark.parametrize("kept_length", [0, 1024])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@by_precision
def test_attention_turns_queries_and_keys_itself(
    dtype: torch.dtype, tolerance: float, kv_heads: int, kept_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... whether the backward pass finds the softmax weights or makes them again."""
    monkeypatch.setattr(cpu_attention, "KEPT_WEIGHTS_LENGTH", kept_length)
    length = 300  # two blocks of rows and a rest
    q = randn(B, length, 4, 6, seed=0, dtype=dtype)
    k, v = (randn(B, length, kv_heads, 6, seed=seed, dtype=dtype) for seed in (1, 2))
    table = op.rotary_table(length, 6, 50.0, torch.device("cpu"), torch.float64)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused_attention(op.rotate(q, table), op.rotate(k, table), v)

    found = with_gradients(lambda q, k, v: causal_attention(q, k, v, table.to(dtype)), q, k, v)
    exact = with_gradients(plain, q.double(), k.double(), v.double())
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert apart(ours, expected) < 3 * tolerance


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("length", [128, 200])
def test_the_compiler_is_told_the_truth_about_attention(
    length: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... by torch's own examination: shapes, strides, aliases and gradients of what it may not look into."""
    monkeypatch.setattr(cpu_attention, "KEPT_WEIGHTS_LENGTH", 1024 if keep else 0)
    parts = [randn(2, 3, length, 4, seed=seed).requires_grad_() for seed in range(3)]
    for given in (True, False):
        torch.library.opcheck(cpu_attention._operator, (*parts, given))


@pytest.mark.parametrize("length", [128, 200])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("turned", [True, False])
@by_precision
def test_compiled_attention_equals_that_by_hand(
    dtype: torch.dtype, tolerance: float, turned: bool, kv_heads: int, length: int
) -> None:
    q = randn(B, length, 4, 8, seed=0, dtype=dtype)
    k, v = (randn(B, length, kv_heads, 8, seed=seed, dtype=dtype) for seed in (1, 2))
    table = op.rotary_table(length, 8, 50.0, torch.device("cpu"), dtype) if turned else None
    torch._dynamo.reset()
    compiled = torch.compile(causal_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    ways = (compiled, causal_attention)
    results = [with_gradients(lambda q, k, v, way=way: way(q, k, v, table), q, k, v) for way in ways]
    for ours, by_hand in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert apart(ours, by_hand) < 4 * tolerance


def test_embedding_and_head_add_to_what_is_there_and_tell_autograd_nothing() -> None:
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    weight, total = randn(V, D, seed=1).requires_grad_(), randn(V, D, seed=2)
    upstream, before = randn(B, T, D, seed=3), total.clone()
    plain = op.embedding(tokens, weight, torch.float64)
    rows = op.embedding(tokens, weight, torch.float64, total)
    assert torch.equal(rows, plain)
    rows.backward(upstream)  # type: ignore[no-untyped-call]
    assert weight.grad is None
    torch.testing.assert_close(total - before, torch.autograd.grad(plain, weight, upstream)[0])

    x, divisor = randn(B, T, D, seed=4).requires_grad_(), torch.tensor(5)
    expected = torch.autograd.grad(op.cross_entropy_sum(x, weight, tokens) / 5, (x, weight))
    before = total.clone()
    mean = op.cross_entropy_sum(x, weight, tokens, divisor, total)
    torch.testing.assert_close(mean, op.cross_entropy_sum(x, weight, tokens) / 5)
    mean.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    torch.testing.assert_close((x.grad, total - before), expected)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_hooks_know_when_gradients_in_place_are_whole(tied: bool, compiled: bool) -> None:
    """... which data parallel waits for: it may send a gradient as soon as its hook has been called."""
    model, block = replace(LLAMA, tied=tied), None
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(decoder_block, backend="aot_eager", fullgraph=True, dynamic=False)
    leaves = {name: value.requires_grad_() for name, value in random_state(model, 0).items()}
    seen: dict[str, Tensor] = {}

    def remember(name: str, leaf: Tensor) -> None:
        assert leaf.grad is not None
        seen[name] = leaf.grad.clone()

    for name, leaf in leaves.items():
        leaf.grad = torch.zeros_like(leaf)
        leaf.register_post_accumulate_grad_hook(functools.partial(remember, name))  # type: ignore[no-untyped-call]
    tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    loss_sums(model, leaves, tokens, tokens, torch.float64, block=block, in_place=True).backward()
    assert [*seen][-1] == "embedding.weight"
    assert tied or next(iter(seen)) == "head.weight"
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.equal(seen[name], leaf.grad)
        assert leaf.grad.any()


def test_every_worker_has_a_divisor_of_its_own() -> None:
    x, weight = randn(N, B, T, D, seed=0).requires_grad_(), randn(N, V, D, seed=1).requires_grad_()
    tokens = torch.randint(V, (N, B, T), generator=torch.Generator().manual_seed(0))
    divisor, total = torch.tensor([1, 3, 14]), torch.zeros(N, V, D, dtype=torch.float64)
    expected = op.cross_entropy_sum(x, weight, tokens) / divisor
    gradients = torch.autograd.grad(expected.sum(), (x, weight))
    means = op.cross_entropy_sum(x, weight, tokens, divisor, total)
    torch.testing.assert_close(means, expected)
    torch.testing.assert_close((*torch.autograd.grad(means.sum(), x), total), gradients)


def test_the_divisor_of_bf16_activations_does_not_round_to_bf16() -> None:
    """A third is off by 0.2 % there, and all of a gradient with it; rounding of its elements averages out."""
    x, weight = randn(8, 128, 64, seed=0, dtype=torch.bfloat16), randn(V, 64, seed=1, dtype=torch.float32)
    tokens = torch.randint(V, (8, 128), generator=torch.Generator().manual_seed(0))
    three = torch.tensor(3)
    bf16 = with_gradients(lambda x, w: op.cross_entropy_sum(x, w, tokens, three), x, weight)
    fp64 = with_gradients(lambda x, w: op.cross_entropy_sum(x, w, tokens, three), x.double(), weight.double())
    for ours, exact in zip(bf16[1:], fp64[1:], strict=True):
        along = (ours.double() * exact).sum() / exact.square().sum()
        assert abs(along - 1) < 5e-4


LLAMA = ModelConfig(
    V, layers=2, width=D, heads=2, ffn_width=20, context_length=T, rope_theta=50.0, norm_eps=1e-5, init_std=0.02
)  # fmt: skip
GPT2 = replace(LLAMA, norm="layernorm", mlp="gelu", positions="learned", qkv_bias=True, output_bias=True)
QWEN3 = replace(LLAMA, qk_norm=True, kv_heads=1, head_dim=8)
FAMILIES = {
    "llama": LLAMA,
    "untied": replace(LLAMA, tied=False),
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "dropout": replace(LLAMA, dropout=0.2),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_by_hand_equals_plain_autograd(
    family: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches in place, against the plain formulas, torch's attention and autograd's own sums."""
    model = FAMILIES[family]
    state = {name: value.to(dtype) for name, value in random_state(model, 0).items()}
    rows = torch.randint(V, (2, B, T + 1), generator=torch.Generator().manual_seed(1))
    keys = None
    if model.dropout:
        keys = torch.randint(2**31, (1 + 3 * model.layers, 2), generator=torch.Generator().manual_seed(2))
        keys = keys.int()
    divisor = torch.tensor(2 * B * T)

    def train(in_place: bool) -> tuple[float, dict[str, Tensor]]:
        leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
        loss = 0.0
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        for row in rows:
            mean = loss_sums(
                model, leaves, row[:, :-1], row[:, 1:], dtype, keys, divisor=divisor, in_place=in_place
            )
            mean.backward()  # type: ignore[no-untyped-call]
            loss += mean.item()
        return loss, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    loss, gradients = train(in_place=True)
    monkeypatch.setattr(op, "fuses", lambda x: False)
    monkeypatch.setattr(attention, "causal_attention", attention.plain_attention)
    expected_loss, expected = train(in_place=False)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert set(gradients) == {spec.name for spec in parameter_specs(model)} == set(expected)
    for name, gradient in expected.items():
        assert gradient.any()
        assert apart(gradients[name], gradient) < tolerance, name


def test_a_compiled_block_leaves_its_gradients_to_autograd() -> None:
    """... beside the others' in place: the same sums as without the compiler, over two micro-batches."""
    torch._dynamo.reset()
    compiled = torch.compile(decoder_block, backend="aot_eager", fullgraph=True, dynamic=False)
    rows = torch.randint(V, (2, B, T + 1), generator=torch.Generator().manual_seed(1))
    results = []
    for block in (compiled, None):
        leaves = {name: value.requires_grad_() for name, value in random_state(LLAMA, 0).items()}
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        for row in rows:
            loss_sums(
                LLAMA, leaves, row[:, :-1], row[:, 1:], torch.float64, block=block, in_place=True
            ).backward()  # type: ignore[no-untyped-call]
        results.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, expected in results[1].items():
        assert expected.any()
        assert apart(results[0][name], expected) < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_gradients_the_results_are_the_same_bits(dtype: torch.dtype) -> None:
    rows = op.FEW_ROWS + 1  # fewer go other ways
    x = randn(1, rows, D, seed=0, dtype=dtype)
    weight = randn(V, D, seed=1, dtype=torch.promote_types(dtype, torch.float32))
    tokens = torch.randint(V, (1, rows), generator=torch.Generator().manual_seed(0))
    works: list[Callable[[Tensor], Tensor]] = [
        op.swiglu,
        lambda x: op.rms_norm(x, weight[0], 0.1),
        lambda x: op.cross_entropy_sum(x, weight, tokens),
    ]
    for work in works:
        trained = work(x.clone().requires_grad_())
        before = x.clone()
        assert trained.requires_grad
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                assert torch.equal(work(x), trained)
        assert torch.equal(x, before)


def test_only_what_runs_eagerly_on_a_cpu_is_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fused.SwiGLU, "apply", lambda x: calls.append("swiglu") or x)
    x = randn(2, 4, seed=0)
    op.swiglu(x)
    assert calls == ["swiglu"]
    with torch.no_grad():  # where nothing needs to be kept
        op.swiglu(x)
    torch.compile(op.swiglu, backend="eager", fullgraph=True)(x)
    assert calls == ["swiglu"]
    assert not op.fuses(torch.empty(1, device="meta"))
