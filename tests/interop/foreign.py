"""Models as transformers builds them, with random weights far from the initial ones, saved to directories."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'tiny-llm[hf]'")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LENGTH = 16  # positions of every model
VOCABULARY = 61
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}

LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    **NO_TOKENS,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **NO_TOKENS,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied-with-biases": (
        "Llama",
        {**LLAMA, "head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-other-rope": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rms_norm_eps": 0.01},
    ),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16}),
    "qwen3-tied-with-biases": (
        "Qwen3",
        {**LLAMA, "head_dim": 6, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": (
        "GPT2",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 24, "layer_norm_epsilon": 0.01},
    ),
}
CLASSES = {"Llama": "LlamaForCausalLM", "Qwen3": "Qwen3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def build(name: str) -> Any:
    """Return one of MODELS, its random weights a function of its name."""
    family, settings = MODELS[name]
    model = getattr(transformers, CLASSES[family])(
        getattr(transformers, f"{family}Config")(**settings)
    ).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and key.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (1.0 if norm else 0.0))
    return model


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """Return tokens and targets [3, LENGTH]."""
    drawn = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def saved(name: str, directory: Path) -> Any:
    """Save one of MODELS as transformers does and return it."""
    model = build(name)
    model.save_pretrained(directory)
    return model
