"""Device memory for state that shrinks while a job runs."""

from __future__ import annotations

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.jobs import Outcome
from tests.interleave.engine.training import MACHINE, Job, ReferenceOptimizer, run


class ShrinkingDevice(EmulatedDevice):
    """A device whose job needs all memory from some moment on."""

    is_full = False

    def free_bytes(self) -> float | None:
        return 0.0 if self.is_full else 1e6


def outcome(policy: str, overlap: str) -> tuple[Outcome, bool]:
    job, device = Job(torch.bfloat16), ShrinkingDevice(None)
    optimizer = InterleavedAdamW(
        job.net.parameters(),
        policy=policy,
        overlap=overlap,  # type: ignore[arg-type]
        gradients="streamed",
        subgroup_params=500,
        machine=MACHINE,
        model=job.net,
        device=device,
    )
    for step in range(16):
        job.step(optimizer)
        optimizer.synchronize()
        device.is_full = step >= 4
    uses_device = any(op.resource == "gpu" for op in optimizer.plan.ops)
    optimizer.close()
    device.close()
    return job.outcome(), uses_device


QUICK = {
    ("interleaved:2", "both"),
    ("interleaved:2@0.3", "forward"),
    ("adaptive", "none"),
}


@pytest.mark.parametrize(
    ("policy", "overlap"),
    [
        pytest.param(
            policy,
            overlap,
            marks=() if (policy, overlap) in QUICK else pytest.mark.slow,
        )
        for policy in ("interleaved:2", "interleaved:2@0.3", "adaptive")
        for overlap in ("none", "forward", "backward", "both", "auto")
    ],
)
def test_step__goes_on_with_the_memory_that_a_plan_has(
    policy: str, overlap: str
) -> None:
    """`adaptive` gives it back."""
    reference = Job(torch.bfloat16)
    expected = run(reference, ReferenceOptimizer(reference.net.parameters()), 16)
    result, resident = outcome(policy, overlap)
    assert result == expected
    assert resident == (policy != "adaptive")


def test_step__goes_on_with_its_plan_where_a_new_one_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = Job(torch.bfloat16)
    expected = run(reference, ReferenceOptimizer(reference.net.parameters()), 8)
    job = Job(torch.bfloat16)
    optimizer = InterleavedAdamW(
        job.net.parameters(),
        policy="adaptive",
        subgroup_params=500,
        machine=MACHINE,
        memory_budget=1e6,
    )
    for _ in range(4):
        job.step(optimizer)
    plan, planner, attempts = optimizer.plan, optimizer._runner.planner, []

    def refuse(budget: object) -> None:
        attempts.append(budget)
        raise EngineError(
            "policy adaptive needs 2 GiB of host memory besides storage, more than "
            "host_memory_budget"
        )

    monkeypatch.setattr(planner, "plan", refuse)
    monkeypatch.setattr(
        planner,
        "replan_reason",
        lambda budget: "cpu_update_params_per_s went from 1 to 2",
    )
    for _ in range(4):
        job.step(optimizer)
    assert len(attempts) == 4
    assert optimizer.plan is plan
    optimizer.close()
    assert job.outcome() == expected
