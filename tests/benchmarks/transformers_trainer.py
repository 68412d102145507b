"""The Trainer of transformers on the same model: what most people would train it with.

The model is the class of transformers that an export of the run would open, with the run's master weights (fp32,
or fp64) and, for bf16, the Trainer's autocast; batch, clipping and AdamW are the run's. A sequence of T tokens has
T - 1 targets here and is counted as T. Evaluation, saving, logging and its progress bar are off.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from tiny_llm.benchmarks.machine import Windows, Yardstick, synchronize
from tiny_llm.benchmarks.measurements import described, plan_of
from tiny_llm.config.plan import Plan, settled
from tiny_llm.interop.families import hf_config
from tiny_llm.training.device import compute_dtype, master_dtype, open_device, settle_runtime

WARM_UP = 3  # updates: compilation, caches, the optimizer's first state


class RandomRows(Dataset[dict[str, Tensor]]):
    """As many sequences of random tokens as training asks for."""

    def __init__(self, rows: int, length: int, vocab_size: int) -> None:
        self.tokens_RT = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens_RT)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens_RT[row], "labels": self.tokens_RT[row]}


class WindowClock(transformers.TrainerCallback):  # type: ignore[misc]
    """Times windows of updates after a warm-up, and the machine around each."""

    def __init__(self, yardstick: Yardstick, updates: int) -> None:
        self.yardstick, self.updates = yardstick, updates
        self.done = 0
        self.windows = Windows([], [])

    def on_step_end(self, *_: object, **__: object) -> None:
        self.done += 1
        if self.done < WARM_UP or (self.done - WARM_UP) % self.updates:
            return
        synchronize(self.yardstick.device)
        if self.done > WARM_UP:
            self.windows.seconds.append(time.perf_counter() - self.start)
        self.windows.machines.append(self.yardstick.machine())
        self.start = time.perf_counter()


def model_of(plan: Plan) -> Any:
    """Return the run's model as its class of transformers, with fresh master weights."""
    values = hf_config(plan.config.model)
    transformers.set_seed(plan.config.runtime.seed)
    config = transformers.AutoConfig.for_model(**values)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=master_dtype(plan.config))


def settings(plan: Plan, directory: str, updates: int) -> Any:
    """Return the TrainingArguments of `updates` updates with the run's batch, precision and AdamW."""
    config = plan.config
    optimizer, device = config.optimizer, open_device(config.runtime.device)
    return transformers.TrainingArguments(
        output_dir=directory,
        max_steps=updates,
        per_device_train_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.accumulation,
        optim="adamw_torch_fused",
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        max_grad_norm=optimizer.grad_clip or 0.0,
        lr_scheduler_type="constant",
        bf16=config.runtime.precision == "bf16",
        torch_compile=bool(config.runtime.compile),
        use_cpu=device.type == "cpu",
        dataloader_num_workers=0,
        dataloader_pin_memory=device.type == "cuda",
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def measure(name: str, overrides: list[str], windows: int, updates: int) -> dict[str, Any]:
    """Measure the Trainer's steady state, as it comes: whole windows of updates after a warm-up."""
    plan = plan_of(overrides)
    config = settled(settle_runtime(plan), plan)
    plan = replace(plan, config=config)
    device = open_device(config.runtime.device)
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    total = WARM_UP + windows * updates
    rows = RandomRows(total * plan.batch_sequences, config.model.context_length, config.data.vocab_size)
    clock = WindowClock(Yardstick(device, compute_dtype(config)), updates)
    with tempfile.TemporaryDirectory() as place:
        trainer = transformers.Trainer(
            model=model_of(plan), args=settings(plan, place, total), train_dataset=rows, callbacks=[clock]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    tokens = updates * config.training.batch_tokens
    return {**described(name, plan, clock.windows, tokens), "execution": name}
