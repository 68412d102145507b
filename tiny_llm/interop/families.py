"""Which class of transformers a decoder is, and its config.json in both directions.

The family follows from the values of the config, never from a preset's name. In flow a `ModelConfig`, out flows
the config.json that stock transformers opens, and back. A family has every bias of a kind or none: one that this
decoder lacks is written as zeros (`Family.expressed`), which computes the same. What no family computes is refused
with the keys in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiny_llm.config.parse import parse_section, show
from tiny_llm.config.schema import ModelConfig
from tiny_llm.interop.tensors import ExchangeError

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One class of transformers. `requires`: keys of the model with the only value that the class computes."""

    architecture: str
    model_type: str
    requires: Mapping[str, Any]
    expressed: Callable[[ModelConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    read: Callable[[Values], dict[str, Any]]

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return the settings of a model that this class cannot express, such as `model.mlp=gelu`."""
        found = [
            f"model.{key}={show(getattr(model, key))}"
            for key, value in self.requires.items()
            if getattr(model, key) != value
        ]
        if self.model_type == "gpt2" and model.groups != model.heads:
            found.append(f"model.kv_heads={model.kv_heads}")
        if self.model_type == "gpt2" and model.heads * model.head_width != model.width:
            found.append(f"model.head_dim={model.head_dim}")
        return found


def family_of(model: ModelConfig) -> Family:
    """Return the family that computes what the model computes. Raises ExchangeError naming what is in the way."""
    obstacles = {family.architecture: family.obstacles(model) for family in FAMILIES}
    for family in FAMILIES:
        if not obstacles[family.architecture]:
            return family
    reasons = "; ".join(f"{name} has no {', '.join(keys)}" for name, keys in obstacles.items())
    raise ExchangeError(
        f"no class of transformers computes this model, so it cannot be exported to=hf: {reasons}; use to=flax"
    )


def read_config(values: Values, where: str) -> tuple[Family, ModelConfig]:
    """Return the family and the model of a config.json. Raises ExchangeError for what is not computed here."""
    family = next((one for one in FAMILIES if one.model_type == values.get("model_type")), None)
    if family is None:
        names = ", ".join(one.model_type for one in FAMILIES)
        raise ExchangeError(f"{where}: model_type={values.get('model_type')!r}; this program reads {names}")
    if unsupported := _unsupported(values):
        raise ExchangeError(f"{where} asks for what this decoder does not compute: {', '.join(unsupported)}")
    model = {key: value for key, value in family.read(values).items() if value is not None}
    return family, parse_section(ModelConfig, {**DEFAULTS, **family.requires, **model}, f"{where}: model")


def _unsupported(values: Values) -> list[str]:
    """Return the switches of a config.json that make it compute something else, as key=value."""
    found = [
        f"{key}={show(values[key])}"
        for key, neutral in NEUTRAL.items()
        if key in values and values[key] not in neutral
    ]
    rope = {"rope_type": "default", **(values.get("rope_parameters") or {})}
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
    found += [f"rope_parameters.{key}={show(rope[key])}" for key in rope if rope[key] != plain.get(key)]
    if windows := set(values.get("layer_types") or []) - {"full_attention"}:
        found.append(f"layer_types={', '.join(sorted(map(str, windows)))}")
    return found


def differences(model: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return the keys in which two models compute differently, each as `model.layers=2 (there 3)`.

    Biases are left out: they are parameters, which are compared name by name.
    """
    keys = ["vocab_size", "layers", "width", "heads", "groups", "head_width", "ffn_width"]
    keys += ["norm", "mlp", "positions", "qk_norm", "tied", "norm_eps"]
    keys.append("context_length" if model.positions == "learned" else "rope_theta")
    names = {"groups": "kv_heads", "head_width": "head_dim"}
    return [
        f"model.{names.get(key, key)}={show(getattr(model, key))} (there {show(getattr(theirs, key))})"
        for key in keys
        if getattr(model, key) != getattr(theirs, key)
    ]


# Switches of the three classes that change what is computed, with the values that leave it as it is here.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
DEFAULTS = {"init_std": 0.02, "rope_theta": 10000.0}


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # transformers 4 reads this line, 5 the next one
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": model.qkv_bias,
        "attention_dropout": model.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "use_cache": True,
    }


def _read_llama(values: Values) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    heads = values.get("num_attention_heads", 32)
    bias = values.get("attention_bias", False)
    return {
        "vocab_size": values.get("vocab_size", 32000),
        "width": values.get("hidden_size", 4096),
        "ffn_width": values.get("intermediate_size", 11008),
        "layers": values.get("num_hidden_layers", 32),
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim"),
        "context_length": values.get("max_position_embeddings", 2048),
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or values.get("rope_theta", 10000.0),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": values.get("mlp_bias", False),
        "tied": values.get("tie_word_embeddings", False),
        "init_std": values.get("initializer_range"),
    }


def _read_qwen3(values: Values) -> dict[str, Any]:
    own = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
    return _read_llama({**own, "num_key_value_heads": 32, "head_dim": 128, **values, "mlp_bias": False})


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.width,
        "n_inner": model.ffn_width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.context_length,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "use_cache": True,
    }


def _read_gpt2(values: Values) -> dict[str, Any]:
    width = values.get("n_embd", 768)
    return {
        "vocab_size": values.get("vocab_size", 50257),
        "width": width,
        "ffn_width": values.get("n_inner") or 4 * width,
        "layers": values.get("n_layer", 12),
        "heads": values.get("n_head", 12),
        "context_length": values.get("n_positions", 1024),
        "norm_eps": values.get("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied": values.get("tie_word_embeddings", True),
        "init_std": values.get("initializer_range"),
    }


def _all_attention_biases(model: ModelConfig) -> ModelConfig:
    either = model.qkv_bias or model.output_bias
    return replace(model, qkv_bias=either, output_bias=either)


def _all_biases(model: ModelConfig) -> ModelConfig:
    return replace(model, qkv_bias=True, output_bias=True, mlp_bias=True)


LLAMA_LIKE = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}
FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        {**LLAMA_LIKE, "qk_norm": False},
        _all_attention_biases,
        lambda model: {**_write_llama(model), "mlp_bias": model.mlp_bias},
        _read_llama,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {**LLAMA_LIKE, "qk_norm": True, "mlp_bias": False},
        _all_attention_biases,
        lambda model: {**_write_llama(model), "use_sliding_window": False},
        _read_qwen3,
    ),
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "qk_norm": False},
        _all_biases,
        _write_gpt2,
        _read_gpt2,
    ),
)


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """Return config.json but for token ids and dtype. Raises ExchangeError where no family fits."""
    family = family_of(model)
    head = {"architectures": [family.architecture], "model_type": family.model_type}
    return head | family.write(family.expressed(model))
