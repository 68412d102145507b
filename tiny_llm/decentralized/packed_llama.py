"""N local models of one shape in one module, their parameters and gradients in two arenas.

`PackedLlama` is ordinary to look at (named parameters, .to, state_dict) with a worker axis in front of every
parameter. Executors take gradients through it in one of two ways: `batched` runs the packed parameters, so that
every matmul has the workers on its leading axis; `looped` runs `worker(i)`, views of one row, one after another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.decentralized.arena import BLOCK, Layout
from tiny_llm.decentralized.mixing import mix_
from tiny_llm.decentralized.topology import Topology
from tiny_llm.models import operations as op
from tiny_llm.models.decoder import head_weight, hidden_states, loss_sums, register
from tiny_llm.models.initialization import initial_parameters

# Packed gradients are strided like their parameters, rows of an arena apart; torch expects them dense.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")


class PackedLlama(nn.Module):
    """`num_models` local models, all starting from the single model's initial weights for `seed`.

    parameter_storage, gradient_storage: [N, D_padded], laid out by `layout`; every parameter and its gradient
    are views of them, before and after `.to`.
    """

    parameter_storage: Tensor
    gradient_storage: Tensor

    def __init__(
        self, model: ModelConfig, num_models: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.model = model
        self.num_models = num_models
        self.layout = Layout.of(parameter_specs(model))
        self.parameter_storage = torch.zeros(num_models, self.layout.size, dtype=dtype)
        self.gradient_storage = torch.zeros_like(self.parameter_storage)
        first = self.layout.views(self.parameter_storage[0])
        for name, value in initial_parameters(model, seed).items():
            first[name].copy_(value)
        self.parameter_storage[1:] = self.parameter_storage[0]
        for name, view in self.layout.views(self.parameter_storage).items():
            register(self, name, nn.Parameter(view))
        self._bind()

    def _bind(self) -> None:
        """Make every parameter and gradient a view of the arenas as they are now."""
        self._packed: dict[str, Tensor] = dict(self.named_parameters())
        for name, view in self.layout.views(self.parameter_storage).items():
            self._packed[name].grad = None
            self._packed[name].data = view
        _point_gradients(self._packed, self.layout.views(self.gradient_storage))
        self._workers = [self._worker_views(i) for i in range(self.num_models)]

    def _worker_views(self, i: int) -> dict[str, Tensor]:
        views = {
            n: v.requires_grad_() for n, v in self.layout.views(self.parameter_storage[i].detach()).items()
        }
        _point_gradients(views, self.layout.views(self.gradient_storage[i]))
        return views

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLlama:
        """Move the arenas, not each parameter: .to(device), .to(dtype) and their kin come through here."""
        self.parameter_storage = fn(self.parameter_storage)
        self.gradient_storage = fn(self.gradient_storage)
        self._bind()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what `_bind` makes, for deepcopy and pickle."""
        return {name: value for name, value in vars(self).items() if name not in ("_packed", "_workers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradient arena; a gradient is never None, whatever torch's default."""
        self.zero_gradients_()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would cut the parameters off their arena; leave assign out, "
                "which copies the values into it"
            )
        return super().load_state_dict(state_dict, strict)

    @torch.no_grad()
    def set_all(self, weights: Mapping[str, Tensor]) -> None:
        """Give every worker the weights of one model, by name."""
        for name, view in self.layout.views(self.parameter_storage).items():
            view.copy_(weights[name])

    def packed(self) -> dict[str, Tensor]:
        """Return the parameters by name with the worker axis first: [N, *shape], gradients in the arena."""
        return self._packed

    def worker(self, i: int) -> dict[str, Tensor]:
        """Return worker i's parameters by name, views of its row whose gradients land in the arena."""
        return self._workers[i]

    def forward(self, tokens_NBT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return every worker's logits [N, B, T, V] for its own tokens [N, B, T]."""
        weight = head_weight(self._packed)
        return op.linear(hidden_states(self.model, self._packed, tokens_NBT, dtype or weight.dtype), weight)

    @torch.no_grad()
    def mix_(self, topology: Topology, step: int, gamma: float = 1.0) -> None:
        """Replace x by W'x with W' = gamma W + (1 - gamma) I of mixing step `step`."""
        mix_(self.parameter_storage, topology.peers(step), gamma)

    def local_state_dict(self, i: int) -> dict[str, Tensor]:
        """Return worker i's weights under the names of the single model, sharing memory with the arena."""
        return self.layout.views(self.parameter_storage[i].detach())

    @torch.no_grad()
    def average_state_dict(self) -> dict[str, Tensor]:
        """Return the mean of all workers' weights, in fp32 at least, under the names of the single model."""
        wide = torch.promote_types(self.parameter_storage.dtype, torch.float32)
        return self.layout.views(self.parameter_storage.mean(0, dtype=wide))

    @torch.no_grad()
    def zero_gradients_(self) -> None:
        self.gradient_storage.zero_()

    @torch.no_grad()
    def gradient_norms(self) -> Tensor:
        """Return each worker's global gradient norm, [N].

        On a CPU `vector_norm` adds a long row up one by one: over 20M elements in fp32 it returns 0.1 % too little.
        Squares of a block of columns are added in the row's dtype, blocks in fp64.
        """
        if self.gradient_storage.device.type != "cpu":
            return torch.stack([torch.linalg.vector_norm(row) for row in self.gradient_storage])
        squares = torch.stack(
            [torch.stack([part.dot(part) for part in row.split(BLOCK)]) for row in self.gradient_storage]
        )
        return squares.sum(1, dtype=torch.float64).sqrt().to(squares.dtype)


def local_mean_losses(
    model: PackedLlama,
    tokens_NBT: Tensor,
    targets_NBT: Tensor,
    dtype: torch.dtype | None = None,
    dropout_keys: Tensor | None = None,
) -> Tensor:
    """Return each worker's mean cross-entropy over its own valid targets, [N], in nats.

    tokens, targets: int64 [N, B, T]; a target of -100 does not count. Differentiate the sum, so that no
    worker's gradient is scaled by N. dropout_keys: int32 [N, places, 2] (`models/dropout.py`); None drops nothing.
    """
    dtype = dtype or model.parameter_storage.dtype
    sums = loss_sums(model.model, model.packed(), tokens_NBT, targets_NBT, dtype, dropout_keys)
    return sums / count_targets(targets_NBT).clamp_min(1)


def count_targets(targets: Tensor) -> Tensor:
    """Return how many of targets [..., B, T] are valid."""
    return (targets != op.IGNORED).sum((-2, -1))


def _point_gradients(parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Let autograd accumulate in place: it adds to a gradient that is already there."""
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
