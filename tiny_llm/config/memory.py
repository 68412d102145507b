"""How much memory training takes, estimated before torch is imported.

An estimate to choose a micro-batch by, in bytes: the four arenas, what one micro-batch keeps for its backward
pass, one block of logits, and where workers are batched the gradient of their heads.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import Config

ALIGNMENT = 64  # elements; every arena entry starts at a multiple of it
LOGIT_BLOCK_BYTES = 128 * 2**20  # the head and its loss go through the targets in blocks of about this size
ATTENTION_ROWS = 128  # of a block of queries, which a CPU multiplies with the keys before its end
KEPT_WEIGHTS_LENGTH = 1024  # positions of the longest sequence whose softmax weights a CPU keeps


def padded(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def training_bytes(config: Config, micro_batch_size: int, ranks: int = 1) -> int:
    """Return the bytes of one of a run's processes that the model accounts for (not the interpreter's own)."""
    master = 8 if config.runtime.precision == "fp64" else 4
    arena = master * sum(padded(spec.numel) for spec in parameter_specs(config.model))
    workers = max(1, config.decentralized.num_models // ranks)
    looped = executes_looped(config)
    at_once = 1 if looped else workers
    head = 0 if looped else 2 * workers * config.model.vocab_size * config.model.width * master  # and scaled
    kept = at_once * micro_batch_size * sequence_bytes(config)
    return 4 * workers * arena + kept + head + 4 * LOGIT_BLOCK_BYTES


def sequence_bytes(config: Config) -> int:
    """Return what one sequence keeps for the backward pass.

    A layer keeps, a token: two residual inputs, two normed ones and the MLP's result (5 widths); q, rotated q
    and the attention's result, and k, rotated k and v (each pair once more where they are normed); gate, up and
    their product or up and its GELU, one more for the backward. A CPU keeps the attention weights of short
    sequences; dropout writes all of them out, and a heap that keeps what is freed, as a CPU's does, holds up to
    twice as much.
    """
    model = config.model
    element = {"fp64": 8, "fp32": 4}.get(config.runtime.precision, 4)
    queries, keys = model.heads * model.head_width, model.groups * model.head_width
    attention = 3 * (queries + keys) + (queries + keys if model.qk_norm else 0)
    mlp = (4 if model.mlp == "swiglu" else 3) * model.ffn_width
    a_token = model.layers * (5 * model.width + attention + mlp) + 4 * model.width
    kept = model.context_length * a_token * element
    rows = model.layers * model.heads * model.context_length  # of attention weights
    if model.dropout:  # the weights in fp32 and as they are multiplied, and what was dropped
        kept += rows * model.context_length * (2 * element + 1) * (1 if on_cuda(config) else 2)
    elif model.context_length <= KEPT_WEIGHTS_LENGTH and not on_cuda(config):
        kept += rows * min(model.context_length, (model.context_length + ATTENTION_ROWS) // 2) * element
    return kept


def executes_looped(config: Config) -> bool:
    """Say whether workers take turns, so that only one worker's activations exist at a time."""
    execution = config.decentralized.execution
    return execution == "looped" or (execution == "auto" and not on_cuda(config))


def on_cuda(config: Config) -> bool:
    device = config.runtime.device
    return device.startswith("cuda") or (device == "auto" and _cuda_bytes() is not None)


def largest_micro_batch(config: Config, sequences: int, ranks: int = 1) -> int:
    """Return the largest divisor of `sequences` that fits into this device; at least 1.

    ranks: how many processes share this machine, if it is a CPU.
    """
    budget = _device_bytes(config) if on_cuda(config) else _device_bytes(config) // ranks
    fitting = [d for d in divisors(sequences) if training_bytes(config, d) <= budget]
    return max(fitting, default=1)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _device_bytes(config: Config) -> int:
    if on_cuda(config) and (cuda := _cuda_bytes()) is not None:
        return cuda * 4 // 5
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cuda_bytes() -> int | None:
    """Return the memory of the smallest visible CUDA device; None when the driver shows none."""
    if not shutil.which("nvidia-smi") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    sizes = [int(line) for line in found.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if found.returncode == 0 and sizes else None
