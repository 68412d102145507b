"""Data-parallel replicas must hold the same bits: each rank hashes its own and compares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from tiny_llm.config.errors import UserError
from tiny_llm.distributed.ranks import Ranks


class ReplicaError(UserError):
    """Data-parallel ranks have drifted apart; the message names which and in what."""


def check_replicas(ranks: Ranks, arenas: Mapping[str, Tensor]) -> None:
    """Raise ReplicaError, on all ranks, unless each arena has the same bits on every rank."""
    for name, arena in arenas.items():
        hashes = ranks.words(hashlib.sha256(arena.cpu().numpy().data).hexdigest())
        different = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
        if different:
            raise ReplicaError(
                f"the {name} of rank {different[0]} are not those of rank 0 to the last bit, as data parallel keeps "
                "them: a rank computed wrongly or differently. Nothing was saved; resume from the last checkpoint, "
                "on equal hardware and software"
            )
