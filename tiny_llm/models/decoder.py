"""The decoder: token ids in, final hidden states or losses out, for one model and for N packed models.

Parameters come as a mapping from the names of `config/parameters.py` to tensors; whether these have a leading
worker axis decides whether one model or N are meant. `Decoder` is one ordinary model with such parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import operations as op

Parameters = Mapping[str, Tensor]


def hidden_states(model: ModelConfig, parameters: Parameters, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the normed last hidden states [(N,) B, T, D], computed in `dtype`, of tokens [(N,) B, T]."""
    x = op.embedding(tokens, parameters["embedding.weight"], dtype)
    for layer in range(model.layers):
        x = _block(model, parameters, f"layers.{layer}.", x)
    return op.rms_norm(x, parameters["norm.weight"], model.norm_eps)


def _block(model: ModelConfig, parameters: Parameters, prefix: str, x: Tensor) -> Tensor:
    normed = op.rms_norm(x, parameters[f"{prefix}attention_norm.weight"], model.norm_eps)
    qkv = op.linear(normed, parameters[f"{prefix}attention.qkv.weight"])
    mixed = op.causal_attention(qkv, model.heads, model.rope_theta)
    x = x + op.linear(mixed, parameters[f"{prefix}attention.output.weight"])
    normed = op.rms_norm(x, parameters[f"{prefix}mlp_norm.weight"], model.norm_eps)
    gate_up = op.linear(normed, parameters[f"{prefix}mlp.gate_up.weight"])
    return x + op.linear(op.swiglu(gate_up), parameters[f"{prefix}mlp.down.weight"])


def loss_sums(
    model: ModelConfig, parameters: Parameters, tokens: Tensor, targets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the summed cross-entropy over valid targets: [] for one model, [N] for packed ones."""
    x = hidden_states(model, parameters, tokens, dtype)
    return op.cross_entropy_sum(x, parameters["embedding.weight"], targets)


class Decoder(nn.Module):
    """One model with the parameters of its config, uninitialised until a state is loaded."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = model
        for spec in parameter_specs(model):
            register(self, spec.name, nn.Parameter(torch.empty(spec.shape, dtype=dtype)))

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return logits [B, T, V] in fp32 at least."""
        parameters = dict(self.named_parameters())
        weight = parameters["embedding.weight"]
        logits_BTV = op.linear(
            hidden_states(self.model, parameters, tokens_BT, dtype or weight.dtype), weight
        )
        return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))


def register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter under its dotted name, making the modules on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, parameter)
