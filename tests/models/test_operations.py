"""The operations of the decoder, one number at a time, for one model and for packed ones."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import cpu_attention
from tiny_llm.models import operations as op
from tiny_llm.models.attention import attend

sys.path.append(str(Path(__file__).parents[1]))
from reference.llama import loop_attention, loop_rms_norm, loop_rotate
from reference.small import apart, one_thread  # noqa: F401

N, B, T, D, V = 3, 2, 5, 8, 11


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# norms, rotations, attention


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rms_norm_equals_the_formula_number_by_number(eps: float) -> None:
    x, weight = randn(N, B, T, D), randn(N, D, seed=1)
    packed = op.rms_norm(x, weight, eps)
    for i in range(N):
        single = op.rms_norm(x[i], weight[i], eps)
        for b in range(B):
            expected = torch.from_numpy(loop_rms_norm(x[i, b].numpy(), weight[i].numpy(), eps))
            torch.testing.assert_close(single[b], expected, rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(packed[i, b], expected, rtol=1e-13, atol=1e-14)


def test_rms_norm_of_bf16_reduces_in_fp32_and_rounds_once() -> None:
    x = (randn(B, T, 512) * 30).bfloat16()
    weight = randn(512, seed=1, dtype=torch.float32)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    result = op.rms_norm(x, weight, 1e-5)
    assert result.dtype == torch.bfloat16
    off = (result != expected.bfloat16()).float().mean()
    assert off < 0.01, "only ties that fp32 rounds the other way may differ"


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_layer_norm_equals_the_formula_for_packed_and_single_models(eps: float) -> None:
    x, weight, bias = randn(N, B, T, D) + 3, randn(N, D, seed=1), randn(N, D, seed=2)
    packed = op.layer_norm(x, weight, bias, eps)
    for i in range(N):
        centred = x[i] - x[i].mean(-1, keepdim=True)
        expected = centred / ((centred**2).sum(-1, keepdim=True) / D + eps) ** 0.5 * weight[i] + bias[i]
        torch.testing.assert_close(packed[i], expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            op.layer_norm(x[i], weight[i], bias[i], eps), expected, rtol=1e-12, atol=1e-13
        )


def test_layer_norm_of_bf16_reduces_in_fp32_and_rounds_once() -> None:
    x = (randn(N, B, T, 512) * 30 + 100).bfloat16()
    weight, bias = (randn(N, 512, seed=seed, dtype=torch.float32) for seed in (1, 2))
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * weight[:, None, None] + bias[:, None, None]
    packed = op.layer_norm(x, weight, bias, 1e-5)
    single = torch.stack([op.layer_norm(x[i], weight[i], bias[i], 1e-5) for i in range(N)])
    for result in (packed, single):
        assert result.dtype == torch.bfloat16
        assert (result != expected.bfloat16()).float().mean() < 0.01


def test_gelu_is_the_tanh_approximation() -> None:
    for value in (-3.0, -0.5, 0.0, 0.1, 2.5):
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
        result = op.gelu(torch.tensor(value, dtype=torch.float64)).item()
        assert result == pytest.approx(value / 2 * (1 + math.tanh(inner)), rel=1e-14)


def test_packed_linear_adds_each_workers_bias() -> None:
    x, weight, bias = randn(N, B, T, D), randn(N, V, D, seed=1), randn(N, V, seed=2)
    packed = op.linear(x, weight, bias)
    for i in range(N):
        torch.testing.assert_close(packed[i], x[i] @ weight[i].T + bias[i], rtol=1e-13, atol=1e-13)
        assert torch.equal(op.linear(x[i], weight[i], bias[i]), functional.linear(x[i], weight[i], bias[i]))
    assert op.linear(x.bfloat16(), weight, bias).dtype == torch.bfloat16


@pytest.mark.parametrize("intel", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(1, 1), (1,), (), (4, 1), (2, 5), (op.FEW_ROWS,), (op.FEW_ROWS + 1,)])
def test_linear_of_few_rows_equals_that_of_torch(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    close: float,
    threads: int,
    intel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """... whosever cores these are."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(op, "_on_intel", lambda: intel)
    x = randn(*shape, 96, dtype=dtype)
    for outputs in (1, 2, 60, 61):
        weight, bias = randn(outputs, 96, seed=1, dtype=dtype), randn(outputs, seed=2, dtype=dtype)
        for left in (weight, weight.t().contiguous().t()):
            for right in (None, bias):
                expected = functional.linear(x, weight, right)
                with torch.no_grad():
                    result = op.linear(x, left, right)
                assert result.is_contiguous()
                torch.testing.assert_close(result, expected, rtol=close, atol=close)


def test_linear_and_rms_norm_that_are_learned_from_are_those_of_torch_in_every_bit() -> None:
    x, weight = randn(1, 1, 96, dtype=torch.float32), randn(50, 96, seed=1, dtype=torch.float32)
    assert torch.equal(op.linear(x, weight), functional.linear(x, weight))
    assert torch.equal(op.rms_norm(x, weight[0], 1e-5), functional.rms_norm(x, (96,), None, 1e-5) * weight[0])


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_rms_norm_of_one_row_or_a_few_is_that_of_many(dtype: torch.dtype, close: float) -> None:
    x, weight = randn(1, 5, 96, dtype=dtype), randn(96, seed=1, dtype=dtype)
    expected = op.rms_norm(x, weight, 1e-2)
    with torch.no_grad():
        for few in (1, 2, 5):
            for place in range(6 - few):
                rows = op.rms_norm(x[:, place : place + few], weight, 1e-2)
                torch.testing.assert_close(rows, expected[:, place : place + few], rtol=close, atol=close)


@pytest.mark.parametrize("head_dim", [2, 6, 8])
def test_rotate_whole_is_rotate(head_dim: int) -> None:
    x_BTHK = randn(B, T, 3, head_dim)
    table = op.rotary_table(T, head_dim, 50.0, torch.device("cpu"), torch.float64)
    whole = op.rotate_whole(x_BTHK, op.whole_rotary_table(table))
    torch.testing.assert_close(whole, op.rotate(x_BTHK, table), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (8, 10000.0), (6, 50.0)])
def test_rotate_equals_the_formula_pair_by_pair(head_dim: int, theta: float) -> None:
    x_BTHK = randn(B, T, 3, head_dim)
    table = op.rotary_table(T, head_dim, theta, torch.device("cpu"), torch.float64)
    rotated = op.rotate(x_BTHK, table)
    for b in range(B):
        for head in range(3):
            expected = torch.from_numpy(loop_rotate(x_BTHK[b, :, head].numpy(), theta))
            torch.testing.assert_close(rotated[b, :, head], expected, rtol=1e-13, atol=1e-14)


def test_rotated_products_depend_on_the_distance_of_positions_alone() -> None:
    length, head_dim = 40, 8
    table = op.rotary_table(length, head_dim, 10000.0, torch.device("cpu"), torch.float64)
    q, k = (randn(1, 1, 1, head_dim, seed=s).expand(1, length, 1, head_dim) for s in (0, 1))
    products = (op.rotate(q, table)[0, :, 0] @ op.rotate(k, table)[0, :, 0].T).numpy()
    for distance in range(-30, 31):
        diagonal = np.diagonal(products, offset=distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-13)
    assert len({round(float(products[t, 0]), 6) for t in range(length)}) > length // 2, "and do depend on it"


def test_rotation_keeps_position_zero_and_every_length() -> None:
    x = randn(B, T, 2, D)
    rotated = op.rotate(x, op.rotary_table(T, D, 10000.0, torch.device("cpu"), torch.float64))
    assert torch.equal(rotated[:, 0], x[:, 0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


def llama_of(heads: int, rope_theta: float) -> ModelConfig:
    return ModelConfig(
        V, layers=1, width=D, heads=heads, ffn_width=4, context_length=T, rope_theta=rope_theta,
        norm_eps=1e-5, init_std=0.02,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 5, 128])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_equals_softmax_over_the_past_query_by_query(
    heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... whether rows go through in blocks of one, in blocks with a rest, or at once."""
    monkeypatch.setattr(cpu_attention, "ROWS", rows)
    model, head_dim = llama_of(heads, 100.0), D // heads
    qkv = randn(N, B, T, 3 * D) * 2
    packed = attend(model, {}, 0, qkv)
    for i in range(N):
        single = attend(model, {}, 0, qkv[i])
        for b in range(B):
            for head in range(heads):
                columns = slice(head * head_dim, (head + 1) * head_dim)
                q, k, v = (qkv[i, b, :, part * D : (part + 1) * D][:, columns].numpy() for part in range(3))
                expected = torch.from_numpy(loop_attention(loop_rotate(q, 100.0), loop_rotate(k, 100.0), v))
                torch.testing.assert_close(single[b, :, columns], expected, rtol=1e-12, atol=1e-13)
                torch.testing.assert_close(packed[i, b, :, columns], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_query_heads_share_key_and_value_heads_in_order(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "ROWS", 2)
    model = replace(llama_of(4, 100.0), kv_heads=kv_heads)
    q, k, v = (randn(B, T, heads, 2, seed=s) for s, heads in enumerate((4, kv_heads, kv_heads)))
    mixed = attend(model, {}, 0, torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1))
    for b in range(B):
        for head in range(4):
            heard = head * kv_heads // 4
            query, key = (loop_rotate(part.numpy(), 100.0) for part in (q[b, :, head], k[b, :, heard]))
            expected = torch.from_numpy(loop_attention(query, key, v[b, :, heard].numpy()))
            found = mixed[b, :, 2 * head : 2 * head + 2]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_swiglu_takes_the_gate_from_the_first_half() -> None:
    gate, up = 0.7, -1.3
    result = op.swiglu(torch.tensor([gate, 2.0, up, 3.0], dtype=torch.float64))
    assert result[0].item() == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=1e-14)
    assert result[1].item() == pytest.approx(2 / (1 + math.exp(-2.0)) * 3, rel=1e-14)


def test_packed_linear_and_embedding_give_each_worker_its_own_weights() -> None:
    x, weight = randn(N, B, T, D), randn(N, V, D, seed=1)
    tokens = torch.randint(V, (N, B, T), generator=torch.Generator().manual_seed(2))
    outputs, rows = op.linear(x, weight), op.embedding(tokens, weight, torch.float64)
    for i in range(N):
        torch.testing.assert_close(outputs[i], x[i] @ weight[i].T, rtol=1e-13, atol=1e-13)
        assert torch.equal(op.linear(x[i], weight[i]), functional.linear(x[i], weight[i]))
        for b in range(B):
            for t in range(T):
                assert torch.equal(rows[i, b, t], weight[i, tokens[i, b, t]])
        assert torch.equal(op.embedding(tokens[i], weight[i], torch.float64), rows[i])


# head and loss

# Bytes of a block of logits, and of a strip in it: a target at once, a few with a rest, all.
BLOCKS = [(1, 1), (8 * V * 2, 1), (8 * V * N * 3, 4 * V * 2), (2**20, 4 * V * 3), (2**20, 2**20)]


def targets_with_holes(seed: int = 5) -> Tensor:
    """[N, B, T]; worker 0 misses some targets, worker 1 a whole row, worker 2 none."""
    targets = torch.randint(V, (N, B, T), generator=torch.Generator().manual_seed(seed))
    targets[0, 0, 1:4] = targets[0, 1, 0] = targets[1, 1] = op.IGNORED
    return targets


def plain_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.stack(
        [
            functional.cross_entropy(
                (x[i] @ weight[i].T).flatten(0, 1), targets[i].flatten(), ignore_index=-100, reduction="sum"
            )
            for i in range(len(x))
        ]
    )


@pytest.mark.parametrize(("block_bytes", "strip_bytes"), BLOCKS)
def test_the_loss_in_blocks_and_its_gradients_equal_plain_cross_entropy(
    block_bytes: int, strip_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "LOGIT_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(op, "STRIP_BYTES", strip_bytes)
    x, weight = randn(N, B, T, D).requires_grad_(), randn(N, V, D, seed=1).requires_grad_()
    targets, factors = targets_with_holes(), torch.tensor([1.0, -0.5, 3.0], dtype=torch.float64)
    expected = plain_losses(x, weight, targets)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), (x, weight))

    packed = op.cross_entropy_sum(x, weight, targets)
    assert packed.shape == (N,)
    torch.testing.assert_close(packed, expected, rtol=1e-13, atol=1e-13)
    gradients = torch.autograd.grad((packed * factors).sum(), (x, weight))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-13)

    for i in range(N):
        single = op.cross_entropy_sum(x[i], weight[i], targets[i])
        assert single.shape == ()
        torch.testing.assert_close(single, expected[i], rtol=1e-13, atol=1e-13)
        own = torch.autograd.grad(single * factors[i], (x, weight))
        for gradient, whole in zip(own, expected_gradients, strict=True):
            torch.testing.assert_close(gradient[i], whole[i], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("block_bytes", "strip_bytes"), BLOCKS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_of_the_loss(
    packed: bool, block_bytes: int, strip_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "LOGIT_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(op, "STRIP_BYTES", strip_bytes)
    x, weight = randn(2, 2, 3, 4).requires_grad_(), randn(2, 5, 4, seed=1).requires_grad_()
    targets = torch.tensor([[[0, 4, -100], [2, 2, 1]], [[-100, -100, 3], [0, 1, 2]]])
    arguments = (
        (x, weight, targets) if packed else (x[0].detach().requires_grad_(), weight[0].detach(), targets[0])
    )
    assert torch.autograd.gradcheck(op.cross_entropy_sum, arguments)


@pytest.mark.parametrize("kept_length", [4, 5])
@pytest.mark.parametrize("rows", [1, 2, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradcheck_of_rotated_attention(
    kv_heads: int, rows: int, kept_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... whether the backward pass finds the softmax weights or makes them again."""
    monkeypatch.setattr(cpu_attention, "ROWS", rows)
    monkeypatch.setattr(cpu_attention, "KEPT_WEIGHTS_LENGTH", kept_length)
    model = replace(llama_of(2, 50.0), head_dim=2, kv_heads=kv_heads)
    qkv = randn(2, 1, 5, (2 + 2 * kv_heads) * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attend(model, {}, 0, x), (qkv,))


def test_gradcheck_of_norms() -> None:
    x, weight = randn(2, 2, 3, 4).requires_grad_(), randn(2, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: op.rms_norm(x, w, 1e-2), (x, weight))


def test_without_a_valid_target_loss_and_gradients_are_zero() -> None:
    x, weight = randn(B, T, D).requires_grad_(), randn(V, D, seed=1).requires_grad_()
    loss = op.cross_entropy_sum(x, weight, torch.full((B, T), op.IGNORED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    for tensor in (x, weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_the_loss_of_bf16_activations_is_summed_in_fp32() -> None:
    x, weight = randn(4, 256, D).bfloat16(), randn(V, D, seed=1, dtype=torch.float32)
    targets = torch.randint(V, (4, 256), generator=torch.Generator().manual_seed(2))
    loss = op.cross_entropy_sum(x, weight, targets)
    logits = (x @ weight.bfloat16().T).double()  # the head multiplies in bf16, the rest is exact here
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation gave back."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_the_logits_of_the_whole_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "LOGIT_BLOCK_BYTES", 4 * 16 * 1000)
    x, weight = randn(4, 64, D).requires_grad_(), randn(1000, D, seed=1).requires_grad_()
    targets = torch.randint(1000, (4, 64), generator=torch.Generator().manual_seed(2))
    with LargestTensor() as largest:
        op.cross_entropy_sum(x, weight, targets).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert (
        apart(x.grad, torch.autograd.grad(plain_losses(x[None], weight[None], targets[None])[0], x)[0])
        < 1e-12
    )
    assert largest.numel <= 16 * 1000 < 4 * 64 * 1000
