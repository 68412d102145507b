"""Where and how a run computes: the `auto` values of the runtime section become facts of this machine."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from dataclasses import replace

import torch

from tiny_llm.config.errors import ConfigError
from tiny_llm.config.placement import Placement
from tiny_llm.config.plan import Plan
from tiny_llm.config.schema import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)

# Compiling a decoder takes twenty seconds on a CPU and saves an eighth of an update in bf16, a twentieth in fp32: at
# 20m two cores have it back after about 1e14 FLOPs.
COMPILE_WORTH_FLOPS = 2e14


def settle_runtime(plan: Plan) -> Config:
    """Return the config with precision and compile decided for this machine. Raises ConfigError."""
    config = plan.config
    device = open_device(config.runtime.device)
    precision = config.runtime.precision
    if precision == "auto":
        precision = "bf16" if multiplies_bf16_fast(device) else "fp32"
    compiled = config.runtime.compile
    if compiled == "auto":
        compiled = _compile_pays(plan, device)
    return replace(config, runtime=replace(config.runtime, precision=precision, compile=compiled))


def open_device(name: str) -> torch.device:
    """Return the device that `runtime.device` names. Raises ConfigError when this machine lacks it."""
    cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count()):
        found = f"{torch.cuda.device_count()} CUDA devices" if cuda else "no CUDA device"
        raise ConfigError(f"runtime.device={name}: this machine shows {found}; use runtime.device=auto")
    return device


def multiplies_bf16_fast(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported())


def compute_dtype(config: Config) -> torch.dtype:
    return DTYPES[config.runtime.precision]


def master_dtype(config: Config) -> torch.dtype:
    return torch.float64 if config.runtime.precision == "fp64" else torch.float32


def prepare_torch(config: Config, placement: Placement | None = None) -> torch.device:
    """Set threads and determinism for this process and return its device. Raises ConfigError."""
    placement = placement or Placement()
    device = _own_device(open_device(config.runtime.device), placement)
    if threads := config.runtime.threads or _fair_threads(placement):
        torch.set_num_threads(threads)
    if config.runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest" if config.runtime.deterministic else "high")
    return device


def _own_device(device: torch.device, placement: Placement) -> torch.device:
    """Return the device of a rank: those of a machine's ranks follow one another."""
    if device.type != "cuda" or placement.local_world == 1:
        return device
    if device.index is not None:
        raise ConfigError(
            f"runtime.device={device}: {placement.local_world} ranks on this machine cannot share one device; "
            "use runtime.device=cuda"
        )
    return torch.device("cuda", placement.local_rank % torch.cuda.device_count())


def _fair_threads(placement: Placement) -> int | None:
    """Return a rank's share of the cores where torchrun, which knows no better, set OMP_NUM_THREADS to 1."""
    if placement.local_world == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    return max(1, len(os.sched_getaffinity(0)) // placement.local_world)


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed: every large tensor would fault its pages in anew otherwise.

    Worth an eighth of the time of an update at 20m. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and platform.libc_ver()[0] == "glibc":
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _compile_pays(plan: Plan, device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return bool(compiler) and 6.0 * plan.parameters * plan.tokens > COMPILE_WORTH_FLOPS
