"""The packed models as a library: build them, take local losses, step, mix."""

from tiny_llm.decentralized.packed_llama import PackedLlama, local_mean_losses
from tiny_llm.optim.adamw import PackedAdamW

__all__ = ["PackedAdamW", "PackedLlama", "local_mean_losses"]
