"""Calls of the optimizer inside torch.inference_mode: the same bits, and memory that
steps outside of it can use."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.jobs import Outcome
from tests.interleave.engine.training import MACHINE, Job, finish


def trained(inside: set[str], policy: str, gradients: Any, overlap: Any) -> Outcome:
    def mode(call: str) -> Any:
        return torch.inference_mode() if call in inside else nullcontext()

    job = Job(torch.bfloat16)
    options: dict[str, Any] = {
        "policy": policy,
        "gradients": gradients,
        "machine": MACHINE,
        "subgroup_params": 500,
    }
    if overlap != "none":
        options.update(overlap=overlap, model=job.net)
    with mode("constructor"):
        optimizer = InterleavedAdamW(job.net.parameters(), **options)
    for step in range(6):
        job.net.zero_grad()
        job.loss(step).backward()
        with mode("step" if step in (0, 3) else "none"):
            optimizer.step()
        with mode("forward"):
            job.net(torch.ones(1, 24).bfloat16(), 1)
        if step == 4:
            with mode("load"):
                optimizer.load_state_dict(optimizer.state_dict())
    return finish(job, optimizer)


@cache
def outside(policy: str, gradients: str, overlap: str) -> Outcome:
    """The outcome of the same calls outside of it."""
    return trained(set(), policy, gradients, overlap)


# (policy, gradients, overlap), and the calls inside by default.
CASES = {
    ("zero-offload", "kept", "none"): ("constructor", "step"),
    ("interleaved:2", "streamed", "both"): ("step", "forward", "load"),
    ("adaptive", "streamed", "forward"): (),
    ("gpu-only", "kept", "none"): ("load",),
}


@pytest.mark.parametrize(
    ("policy", "gradients", "overlap", "inside"),
    [
        pytest.param(*case, inside, marks=() if inside in quick else pytest.mark.slow)
        for case, quick in CASES.items()
        for inside in ("constructor", "step", "forward", "load")
    ],
)
def test_calls__work_in_inference_mode(
    policy: str, gradients: str, overlap: str, inside: str
) -> None:
    assert trained({inside}, policy, gradients, overlap) == outside(
        policy, gradients, overlap
    )
