"""The key-value cache of sampling: what the positions before said, so that one new token costs one position.

B sequences  T new positions  S positions so far  G key/value heads  K head dimension
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import operations as op


class KeyValueCache:
    """Rotated keys and values of every layer for `rows` sequences of one model, up to its context length."""

    def __init__(self, model: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (model.layers, rows, model.context_length, model.groups, model.head_width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.angles: Tensor | None = None  # of every position
        if model.positions == "rope":
            table = op.rotary_table(model.context_length, model.head_width, model.rope_theta, device, dtype)
            self.angles = op.whole_rotary_table(table)

    def keep(self, rows: list[int]) -> None:
        """Forget every sequence but `rows`, which move up."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def at(self, rows: list[int], starts: list[int], length: int) -> CachedPositions:
        """Return the next `length` positions of the sequences `rows`, each beginning at its own of `starts`."""
        everyone = rows == list(range(self.keys.shape[1]))
        if everyone and min(starts) == max(starts):
            return self._in_step(starts[0], length)
        device = self.keys.device
        positions_BT = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
        end = max(starts) + length
        allowed_BTS = torch.arange(end, device=device) <= positions_BT[..., None]
        return CachedPositions(
            self,
            rows_B=slice(None) if everyone else torch.tensor(rows, device=device),
            positions=positions_BT,
            end=end,
            allowed_BTS=allowed_BTS,
            angles=None if self.angles is None else self.angles[:, positions_BT],
        )

    def _in_step(self, start: int, length: int) -> CachedPositions:
        """Return the next `length` positions where all sequences are at the same: slices, nothing is gathered."""
        end = start + length
        allowed_BTS = None
        if length > 1:
            places_S = torch.arange(end, device=self.keys.device)
            allowed_BTS = (places_S <= places_S[start:, None])[None]
        return CachedPositions(
            self,
            rows_B=slice(None),
            positions=slice(start, end),
            end=end,
            allowed_BTS=allowed_BTS,
            angles=None if self.angles is None else self.angles[:, start:end],
        )


@dataclass(frozen=True)
class CachedPositions:
    """Positions about to be computed, and which of the first `end` positions each of them may see (None: all).

    rows_B: the sequences of the cache that these are. positions: [B, T], or a slice where all sequences are at
    the same. angles: their `whole_rotary_table` [2, (B,) T, 1, K], None without rotation. Positions that a shorter
    sequence does not have yet hold anything; no position looks past itself, and each is written before it is
    looked at.
    """

    cache: KeyValueCache
    rows_B: Tensor | slice
    positions: Tensor | slice
    end: int
    allowed_BTS: Tensor | None
    angles: Tensor | None

    def extend(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new positions' keys and values; return all up to `end`, [B, S, G, K]."""
        return (
            self._extend(self.cache.keys[layer], k_BTGK),
            self._extend(self.cache.values[layer], v_BTGK),
        )

    def _extend(self, store_BCGK: Tensor, new_BTGK: Tensor) -> Tensor:
        if isinstance(self.positions, slice):
            store_BCGK[:, self.positions] = new_BTGK
        else:
            rows_B = torch.arange(len(store_BCGK), device=store_BCGK.device)[self.rows_B]
            store_BCGK[rows_B[:, None], self.positions] = new_BTGK
        return store_BCGK[self.rows_B, : self.end]
