"""The loss never holds the logits of a batch, in a process whose peak memory is read from the kernel.

VmHWM is the peak of this program alone; ru_maxrss of a child begins with the peak of the process that started it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TARGETS, VOCABULARY = 16 * 1024, 32_000
FULL_LOGITS = 4 * TARGETS * VOCABULARY  # bytes, in fp32

LOSS = f"""
import re
import sys
from pathlib import Path

import torch

from tiny_llm.models.operations import cross_entropy_sum


def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])


torch.set_num_threads(2)
dtype = getattr(torch, sys.argv[1])
x_BTD = torch.randn(16, {TARGETS} // 16, 64).to(dtype).requires_grad_()
weight_VD = torch.randn({VOCABULARY}, 64).requires_grad_()
targets_BT = torch.randint({VOCABULARY}, x_BTD.shape[:2])
cross_entropy_sum(x_BTD[:, :1], weight_VD, targets_BT[:, :1]).backward()  # what torch itself takes
before = peak_bytes()
cross_entropy_sum(x_BTD, weight_VD, targets_BT).backward()
assert x_BTD.grad.abs().sum() > 0 and weight_VD.grad.abs().sum() > 0
print(peak_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loss_and_gradients_take_less_than_a_quarter_of_the_full_logits(dtype: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", LOSS, dtype], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert 0 < int(child.stdout) < FULL_LOGITS / 4
