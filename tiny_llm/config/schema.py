"""Every setting of a run: frozen dataclasses whose annotations carry type and bounds.

conf/ holds the values, this page the types; `parse.py` turns a composed mapping into these classes and
`validation.py` checks what concerns several keys at once. The sections whose keys depend on a choice
(schedule, data) are unions: their first field names the member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass(frozen=True)
class Bound:
    """Bounds of a number; `over` and `under` exclude the value itself."""

    over: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    under: float | None = None

    def allows(self, value: float) -> bool:
        return (
            (self.over is None or value > self.over)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.under is None or value < self.under)
        )

    def __str__(self) -> str:
        limits = [
            f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
            for sign, limit in (
                (">", self.over),
                (">=", self.at_least),
                ("<=", self.at_most),
                ("<", self.under),
            )
            if limit is not None
        ]
        return " and ".join(limits)


PositiveInt = Annotated[int, Bound(at_least=1)]
Count = Annotated[int, Bound(at_least=0)]
Seed = Annotated[int, Bound(at_least=0, at_most=2**32 - 1)]
Positive = Annotated[float, Bound(over=0)]
NonNegative = Annotated[float, Bound(at_least=0)]
Fraction = Annotated[float, Bound(at_least=0, at_most=1)]
Share = Annotated[float, Bound(over=0, at_most=1)]
Beta = Annotated[float, Bound(at_least=0, under=1)]


@dataclass(frozen=True)
class ModelConfig:
    """One decoder; a family is a choice of these values. The defaults make a Llama, as in older saved configs."""

    vocab_size: PositiveInt
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    ffn_width: PositiveInt
    context_length: PositiveInt
    rope_theta: Positive
    norm_eps: Positive
    init_std: Positive
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    positions: Literal["rope", "learned"] = "rope"
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    dropout: Beta = 0.0

    @property
    def head_width(self) -> int:
        """Elements of one head: head_dim, or an equal share of the width."""
        return self.head_dim or self.width // self.heads

    @property
    def groups(self) -> int:
        """Key/value heads: kv_heads, or one for each query head."""
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class TrainingConfig:
    """The budget is `updates`, or tokens_per_parameter; an epoch's is epoch_updates, or that per parameter."""

    tokens_per_parameter: Positive | None
    epoch_tokens_per_parameter: Positive | None
    batch_tokens: PositiveInt
    micro_batch_size: PositiveInt | None
    log_every: PositiveInt
    checkpoint_policy: Literal["none", "final", "interval", "explicit"]
    checkpoint_epochs: PositiveInt | tuple[PositiveInt, ...]
    save_epoch_training_state: bool
    recovery_minutes: Positive | None
    updates: PositiveInt | None = None
    epoch_updates: PositiveInt | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    lr: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    weight_decay: NonNegative
    grad_clip: Positive | None


@dataclass(frozen=True)
class CosineSchedule:
    name: Literal["cosine"]
    warmup_steps: Count
    min_lr_ratio: Fraction


@dataclass(frozen=True)
class WsdSchedule:
    name: Literal["wsd"]
    warmup_steps: Count
    decay_fraction: Fraction


@dataclass(frozen=True)
class ConstantSchedule:
    name: Literal["constant"]
    warmup_steps: Count


Schedule = CosineSchedule | WsdSchedule | ConstantSchedule


@dataclass(frozen=True)
class CorpusSettings:
    """What every corpus has. `vocab_size` is known here without loading the tokenizer."""

    name: str
    cache_dir: str
    vocab_size: Annotated[int, Bound(at_least=257, at_most=65536)]
    shuffle_seed: Seed
    shuffle_buffer: PositiveInt
    shard_tokens: PositiveInt
    prepare_workers: PositiveInt
    batch_documents: PositiveInt
    shuffle_group_size: PositiveInt
    prefetch: bool
    max_passes: PositiveInt


@dataclass(frozen=True)
class StdlibCorpus(CorpusSettings):
    """The .py files of the running interpreter's standard library."""

    name: Literal["stdlib"]
    held_out_share: Annotated[float, Bound(over=0, under=1)]
    validation_tokens: PositiveInt | None = None


@dataclass(frozen=True)
class TextCorpus(CorpusSettings):
    """Local files: .txt, .jsonl, .jsonl.gz, .parquet."""

    name: Literal["text"]
    paths: tuple[str, ...]
    separator: str
    text_field: str
    tokenizer: str
    held_out_share: Annotated[float, Bound(over=0, under=1)]
    validation_tokens: PositiveInt | None = None


@dataclass(frozen=True)
class HubCorpus(CorpusSettings):
    """A dataset of the Hugging Face Hub, streamed. `validation_split=null` holds out by content."""

    name: Literal["c4", "tinystories", "fineweb"]
    dataset: str
    subset: str | None
    revision: str
    train_split: str
    validation_split: str | None
    text_field: str
    tokenizer: str
    tokenizer_revision: str
    held_out_share: Annotated[float, Bound(over=0, under=1)]
    attempts: PositiveInt


DataConfig = StdlibCorpus | TextCorpus | HubCorpus


@dataclass(frozen=True)
class DecentralizedConfig:
    """`off` has one model, synchronous training; awc mixes, then updates; atc updates, then mixes."""

    scheme: Literal["off", "awc", "atc"]
    num_models: PositiveInt
    execution: Literal["auto", "batched", "looped"]
    mix_every: PositiveInt


@dataclass(frozen=True)
class TopologyConfig:
    name: str
    k: PositiveInt
    seed: Seed


@dataclass(frozen=True)
class AdaptiveConsensusConfig:
    enabled: bool
    start_frac: Fraction | None
    p: NonNegative | None


@dataclass(frozen=True)
class EvaluationConfig:
    subset_blocks: PositiveInt
    batch_size: PositiveInt
    seed: Seed
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuntimeConfig:
    seed: Seed
    deterministic: bool
    device: str
    precision: Literal["auto", "fp32", "bf16", "fp64"]
    compile: Literal["auto"] | bool
    threads: PositiveInt | None
    timeout_seconds: Positive = 600.0


@dataclass(frozen=True)
class Config:
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: Schedule
    decentralized: DecentralizedConfig
    topology: TopologyConfig
    adaptive_consensus: AdaptiveConsensusConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    runtime: RuntimeConfig
    tracking: Literal["none", "tensorboard", "wandb"]
    sample_prompt: str | None
    output_dir: str
    init_from: str | None = field(default=None)
    resume: str | None = field(default=None)
    dry_run: bool = field(default=False)
