"""The decoder: token ids in, final hidden states or losses out, for one model and for N packed models.

Parameters come as a mapping from the names of `config/parameters.py` to tensors; whether these have a leading
worker axis decides whether one model or N are meant. `Decoder` is one ordinary model with such parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tiny_llm.config.parameters import parameter_specs
from tiny_llm.config.schema import ModelConfig
from tiny_llm.models import operations as op
from tiny_llm.models.attention import attend
from tiny_llm.models.cache import CachedPositions
from tiny_llm.models.dropout import DROPOUTS_A_LAYER

Parameters = Mapping[str, Tensor]
Block = Callable[..., Tensor]  # `decoder_block`, plain or compiled


def hidden_states(
    model: ModelConfig,
    parameters: Parameters,
    tokens: Tensor,
    dtype: torch.dtype,
    dropout_keys: Tensor | None = None,
    cached: CachedPositions | None = None,
    block: Block | None = None,
    layers: Sequence[Parameters] | None = None,
    in_place: bool = False,
) -> Tensor:
    """Return the normed last hidden states [(N,) B, T, D], computed in `dtype`, of tokens [(N,) B, T].

    dropout_keys: int32 [(N,) places, 2] of `dropout.py`; None, as in evaluation, drops nothing. cached: for
    tokens that continue sequences of a `KeyValueCache`. block: a compiled `decoder_block`. layers: every layer's
    `layer_parameters`, from callers that hold them because a token costs little more than looking them up.
    in_place: as in `loss_sums`.
    """
    weight = parameters["embedding.weight"]
    x = op.embedding(tokens, weight, dtype, weight.grad if in_place else None)
    if model.positions == "learned":
        x = x + _positions(parameters["positions.weight"], tokens.shape[-1], cached).to(dtype)
    x = _dropped(model, x, dropout_keys, 0)
    for layer in range(model.layers):
        own = layer_parameters(parameters, layer) if layers is None else layers[layer]
        keys = None if dropout_keys is None else dropout_keys[..., 1 + DROPOUTS_A_LAYER * layer :, :]
        place = 0 if cached is None else layer  # only caches ask; a compiled block would be made once a layer
        x = (block or decoder_block)(model, own, place, x, keys, cached)
    return _normed(model, parameters, "norm", x)


def _positions(weight: Tensor, length: int, cached: CachedPositions | None) -> Tensor:
    """Return the vectors of the positions: [(N,) 1, T, D], or [(B,) T, D] of a cache's sequences."""
    if cached is not None:
        return weight[cached.positions]
    return weight.unsqueeze(-3)[..., :length, :]


def layer_parameters(parameters: Parameters, layer: int) -> Parameters:
    """Return a layer's own parameters, by the names that every layer has."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def decoder_block(
    model: ModelConfig,
    parameters: Parameters,
    layer: int,
    x: Tensor,
    dropout_keys: Tensor | None,
    cached: CachedPositions | None,
) -> Tensor:
    """Return the residual stream after a layer; compiled once, it serves all layers of a model."""
    normed = _normed(model, parameters, "attention_norm", x)
    qkv = _linear(parameters, "attention.qkv", normed)
    weights_key = None if dropout_keys is None else dropout_keys[..., 0, :]
    mixed = attend(model, parameters, layer, qkv, weights_key, cached)
    x = x + _dropped(model, _linear(parameters, "attention.output", mixed), dropout_keys, 1)
    normed = _normed(model, parameters, "mlp_norm", x)
    return x + _dropped(model, _mlp(model, parameters, normed), dropout_keys, 2)


def _mlp(model: ModelConfig, parameters: Parameters, x: Tensor) -> Tensor:
    if model.mlp == "swiglu":
        activated = op.swiglu(_linear(parameters, "mlp.gate_up", x))
    else:
        activated = op.gelu(_linear(parameters, "mlp.up", x))
    return _linear(parameters, "mlp.down", activated)


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return op.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _normed(model: ModelConfig, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    weight = parameters[f"{name}.weight"]
    if model.norm == "rmsnorm":
        return op.rms_norm(x, weight, model.norm_eps)
    return op.layer_norm(x, weight, parameters[f"{name}.bias"], model.norm_eps)


def _dropped(model: ModelConfig, x: Tensor, dropout_keys: Tensor | None, place: int) -> Tensor:
    return x if dropout_keys is None else op.dropout(x, model.dropout, dropout_keys[..., place, :])


def head_weight(parameters: Parameters) -> Tensor:
    """Return the head [(N,) V, D]: a matrix of its own, or the embedding."""
    head = parameters.get("head.weight")
    return parameters["embedding.weight"] if head is None else head


def loss_sums(
    model: ModelConfig,
    parameters: Parameters,
    tokens: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    dropout_keys: Tensor | None = None,
    block: Block | None = None,
    divisor: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """Return the summed cross-entropy over valid targets: [] for one model, [N] for packed ones.

    divisor: what the sums are divided by, of their shape. in_place: the gradients of embedding and head, most of a
    small model's, are added to `.grad` as they come, with no other matrix of their size; of autograd only the
    parameters' hooks are left. For callers that go on to `backward()` from the sum of the result.
    """
    x = hidden_states(model, parameters, tokens, dtype, dropout_keys, block=block, in_place=in_place)
    weight = head_weight(parameters)
    return op.cross_entropy_sum(x, weight, targets, divisor, weight.grad if in_place else None)


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
        weight = head_weight(parameters)
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
