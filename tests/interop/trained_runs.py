"""What small runs the tests of this room train; conftest.py trains them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FAMILIES = {
    "llama": ["model=tiny"],
    "qwen3": ["model=qwen3-v0", "model.head_dim=8", "model.kv_heads=1"],
    "gpt2": ["model=gpt2-small", "model.dropout=0.1"],
}
RunOf = Callable[[str, int], Path]  # the directory of a run by family and number of workers
