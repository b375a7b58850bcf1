"""Forks of a process in which autograd ran on a device that is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import run_process

JOB = """
import torch
from ebbtide.features.dryrun.torch_2_13.device.cuda_stubs import CudaStubs
from tests.features.dryrun.forked import run_forked

def backward():
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    return weight.grad.tolist()

stubs = CudaStubs(torch, 1)
backward()
stubs.remove()
print(run_forked(backward))
"""


@pytest.mark.slow
def test_run_forked__works_after_a_backward_beside_a_stub_of_a_gpu() -> None:
    done = run_process([sys.executable, "-c", JOB], cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0]\n"), done.stderr
