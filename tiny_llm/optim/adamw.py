"""AdamW over arenas: a worker's row is two long vectors, what decays and what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tiny_llm.config.schema import OptimizerConfig
from tiny_llm.decentralized.arena import blocks

BlockWork = Callable[[slice], None]

CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Block:
    """Some columns of the arenas: each worker's parameters, gradients and moments there, as views."""

    columns: slice
    weight_decay: float
    workers: list[tuple[Tensor, ...]]


class PackedParameters(Protocol):
    """What AdamW needs of a packed model."""

    parameter_storage: Tensor
    gradient_storage: Tensor

    @property
    def layout(self) -> Any: ...

    def gradient_norms(self) -> Tensor: ...


class PackedAdamW:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with local moments for each of N packed models.

    first_moment_storage, second_moment_storage: [N, D_padded], laid out like the parameters. Build it after
    the model is on its device and in its dtype.
    """

    def __init__(self, model: PackedParameters, config: OptimizerConfig) -> None:
        self.model = model
        self.config = config
        self.updates = 0
        self._parameters = model.parameter_storage
        self.first_moment_storage = torch.zeros_like(model.parameter_storage)
        self.second_moment_storage = torch.zeros_like(model.parameter_storage)
        self._cut: tuple[Tensor, list[Block]] | None = None

    @torch.no_grad()
    def step(
        self,
        lr: float | None = None,
        norms: Tensor | None = None,
        before: BlockWork | None = None,
        after: BlockWork | None = None,
    ) -> None:
        """Clip each worker's gradient by its own norm and apply one local update.

        lr: this update's rate, config.lr when None. norms: [N], the gradients' norms if already taken. before,
        after: what to do to a block of columns around its update, while it is in the caches: mixing.
        Raises RuntimeError when the model has moved since this optimizer was built.
        """
        if self.model.parameter_storage is not self._parameters:
            raise RuntimeError(
                "the model was moved or converted after PackedAdamW was built, so this optimizer would train "
                "stale storage; build PackedAdamW after .to(...)"
            )
        self.updates += 1
        lr = self.config.lr if lr is None else lr
        divisors = self._clip_divisors(norms)
        steps = torch.tensor(float(self.updates), device=self._parameters.device)
        for block in self._blocks():
            if before is not None:
                before(block.columns)
            for parts, divisor in zip(block.workers, divisors, strict=True):
                self._update_block(parts, lr, block.weight_decay, divisor, steps)
            if after is not None:
                after(block.columns)

    def _blocks(self) -> list[Block]:
        """Return the arenas in blocks; made anew only when the gradients lie elsewhere, for views take their time."""
        gradients = self.model.gradient_storage
        if self._cut is None or self._cut[0] is not gradients:
            arenas = (self._parameters, gradients, self.first_moment_storage, self.second_moment_storage)
            decayed = self.model.layout.decayed
            found = [
                Block(
                    columns,
                    weight_decay,
                    list(zip(*(arena[:, columns].unbind() for arena in arenas), strict=True)),
                )
                for start, stop, weight_decay in (
                    (0, decayed, self.config.weight_decay),
                    (decayed, None, 0.0),
                )
                for columns in blocks(self._parameters, start, stop)
            ]
            self._cut = gradients, found
        return self._cut[1]

    def _clip_divisors(self, norms: Tensor | None) -> list[Tensor | None]:
        """Return max(1, (norm + eps) / threshold) for each worker: the kernel divides by it as it reads."""
        if self.config.grad_clip is None:
            return [None] * len(self._parameters)
        norms = self.model.gradient_norms() if norms is None else norms
        divisors = ((norms + CLIP_EPS) / self.config.grad_clip).clamp_min(1.0)
        if divisors.dtype == torch.float64:  # the kernel divides in fp32 only
            self.model.gradient_storage /= divisors[:, None]
            return [None] * len(divisors)
        return list(divisors.float().unbind())

    def _update_block(
        self, parts: tuple[Tensor, ...], lr: float, weight_decay: float, divisor: Tensor | None, steps: Tensor
    ) -> None:
        parameter, gradient, first, second = parts
        torch._fused_adamw_(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [steps],
            lr=lr,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=weight_decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=None,
        )
