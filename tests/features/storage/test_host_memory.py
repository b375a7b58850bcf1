"""A job with state in storage: its peak resident memory is within `host_memory_budget`
and a stated overhead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import run_process

BUDGET = 110_000_000
# Stacks of threads, and small blocks that allocators keep: docs/storage.md states it.
OVERHEAD = 16_000_000
# State of 192 MB, copies of gradients and parameters of 64 MB. The baseline has
# gradients, and the compiled kernels.
JOB = """
import sys

import torch

from ebbtide.interleave import InterleavedAdamW
from tests.process_sizes import process_bytes

folder, policy, overlap, budget = *sys.argv[1:4], float(sys.argv[4])


def optimizer_of(params, **options):
    return InterleavedAdamW(params, policy=policy, subgroup_params=500_000, threads=1, **options)


def backward():
    model.zero_grad(set_to_none=False)
    model(batch).float().square().mean().backward()


torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000, bias=False) for _ in range(16)]).to(torch.bfloat16)
batch = torch.randn(4, 1000).to(torch.bfloat16)
backward()
warm = torch.nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))
optimizer = optimizer_of([warm])
for _ in range(4):
    warm.grad = torch.ones_like(warm)
    optimizer.step()
optimizer.close()
backward()

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
baseline = process_bytes("VmHWM")
options = {"overlap": overlap, "model": model} if overlap != "none" else {}
optimizer = optimizer_of(
    model.parameters(), storage=folder, host_memory_budget=budget, memory_budget=0.0, **options
)
for step in range(8):
    backward()
    optimizer.step()
    if step == 5:
        optimizer.load_state_dict(optimizer.commit())
optimizer.synchronize()
assert optimizer.plan.stored
optimizer.close()
print(process_bytes("VmHWM") - baseline)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "overlap"), [("pipelined", "none"), ("adaptive", "forward")]
)
def test_optimizer__stays_within_its_host_memory_budget(
    tmp_path: Path, policy: str, overlap: str
) -> None:
    done = run_process(
        [sys.executable, "-c", JOB, tmp_path, policy, overlap, str(BUDGET)]
    )
    assert done.returncode == 0, done.stderr
    used = int(done.stdout)
    assert 0.8 * BUDGET < used <= BUDGET + OVERHEAD
