"""The rule adamw-remainder: the bits of its reference, checkpoints, edits and what is
refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ebbtide.features.rules import remainder
from ebbtide.features.rules.adamw_remainder import ADAMW_REMAINDER
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError, UpdateNotStarted
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.norm import sum_of_squares, total
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE


class ReferenceJob:
    """Parameters that the reference updates, with gradients from a generator."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.params = [
            torch.randn(length, generator=generator).bfloat16() for length in lengths
        ]
        self.rows = [
            [
                torch.zeros(length, dtype=torch.int16),
                torch.zeros(length),
                torch.zeros(length),
            ]
            for length in lengths
        ]
        self.steps = [0] * len(lengths)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the next step; now and then there is none for a
        parameter."""
        gradients = [
            torch.randn(len(param), generator=self.generator).bfloat16()
            for param in self.params
        ]
        missing = torch.rand(len(gradients), generator=self.generator) < 0.1
        missing[0] = False
        return [
            None if is_missing else grad
            for grad, is_missing in zip(gradients, missing, strict=True)
        ]

    def step(
        self, gradients: list[torch.Tensor | None], max_norm: float | None
    ) -> None:
        norm = math.sqrt(
            total(sum_of_squares(grad) for grad in gradients if grad is not None)
        )
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.steps[index] += 1
                scalars = Hyper().scalars(self.steps[index], scale)
                reference.update(
                    gradient,
                    self.rows[index],
                    self.params[index],
                    scalars,
                    ADAMW_REMAINDER,
                )


def optimizer_of(
    params: list[torch.Tensor],
    policy: str,
    rule: str = "adamw-remainder",
    **options: Any,
) -> InterleavedOptimizer:
    arguments = {"subgroup_params": 70, "threads": 1, "machine": MACHINE, **options}
    return InterleavedOptimizer(params, rule, policy=policy, **arguments)


def run_steps(
    job: ReferenceJob,
    params: list[torch.Tensor],
    optimizer: InterleavedOptimizer,
    count: int,
    max_norm: float | None,
) -> None:
    """Run steps of both with the same gradients, by a backward, and compare the
    parameters."""
    for _ in range(count):
        gradients = job.gradients()
        for param in params:
            param.grad = None
        pairs = [
            (param, grad)
            for param, grad in zip(params, gradients, strict=True)
            if grad is not None
        ]
        torch.autograd.backward(
            [param for param, _ in pairs], [grad for _, grad in pairs]
        )
        job.step(gradients, max_norm)
        optimizer.step()
        for param, expected in zip(params, job.params, strict=True):
            assert torch.equal(bits(param.detach()), bits(expected))


def leaves(job: ReferenceJob) -> list[torch.Tensor]:
    return [param.clone().requires_grad_() for param in job.params]


def masters(job: ReferenceJob) -> list[torch.Tensor]:
    return [
        remainder.join_tensors(param, rows[0])
        for param, rows in zip(job.params, job.rows, strict=True)
    ]


def assert_states(optimizer: InterleavedOptimizer, job: ReferenceJob) -> None:
    saved = optimizer.state_dict()["state"]
    for index, master in enumerate(masters(job)):
        if job.steps[index]:
            assert torch.equal(bits(saved[index]["master"]), bits(master))
            assert torch.equal(bits(saved[index]["exp_avg"]), bits(job.rows[index][1]))
            assert torch.equal(
                bits(saved[index]["exp_avg_sq"]), bits(job.rows[index][2])
            )


def test_engine__holds_10_bytes_of_state_and_fetches_as_many() -> None:
    job = ReferenceJob([700], 0)
    params = leaves(job)
    optimizer = optimizer_of(params, "interleaved:2")
    run_steps(job, params, optimizer, 1, None)
    assert optimizer._runner.engine.store.states.host_bytes == 10 * 700
    moved = {(op.kind, op.subgroup): op.nbytes for op in optimizer.plan.ops}
    assert moved["fetch", 1] == moved["flush", 1] == 10 * 70
    optimizer.close()


def test_step__does_not_write_returned_gradients_to_parameters() -> None:
    """Memory for two states and little more: gradients of updates on the GPU go to the
    host and back."""
    job = ReferenceJob([700], 1)
    params = leaves(job)
    options = {"gradients": "streamed", "max_grad_norm": 3.0, "memory_budget": 2200}
    optimizer = optimizer_of(params, "interleaved:2", **options)
    assert any(op.kind == "gradient up" for op in optimizer.plan.ops)
    run_steps(job, params, optimizer, 3, 3.0)
    assert_states(optimizer, job)
    optimizer.close()


def test_load_state_dict__takes_fp32_masters_and_gives_them() -> None:
    job = ReferenceJob([200], 5)
    params = leaves(job)
    fp32 = optimizer_of(params, "pipelined", "adamw")
    params[0].grad = torch.ones_like(params[0])
    fp32.step()
    saved = fp32.state_dict()
    fp32.close()
    own = optimizer_of(params, "interleaved:2")
    own.load_state_dict(saved)
    back = own.state_dict()["state"][0]
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(back[name]), bits(saved["state"][0][name]))
    # The state dict of torch has no masters: they start from the parameters.
    del saved["state"][0]["master"], saved["ebbtide"]
    own.load_state_dict(saved)
    assert torch.equal(
        own.state_dict()["state"][0]["master"], params[0].detach().float()
    )
    own.close()


def test_step__is_completed_on_the_cpu_if_the_device_refuses_an_update() -> None:
    device = EmulatedDevice(capacity_bytes=1e6)
    job = ReferenceJob([500, 200], 6)
    params = leaves(job)
    optimizer = optimizer_of(
        params, "adaptive", device=device, gradients="streamed", max_grad_norm=3.0
    )
    run_steps(job, params, optimizer, 3, 3.0)
    assert any(op.resource == "gpu" for op in optimizer.plan.ops)
    device.update = lambda updates: _refuse()  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="completed on the CPU"):
        run_steps(job, params, optimizer, 1, 3.0)
    del device.update
    for param, expected in zip(params, job.params, strict=True):
        assert torch.equal(bits(param.detach()), bits(expected))
    run_steps(job, params, optimizer, 2, 3.0)
    assert_states(optimizer, job)
    optimizer.close()
    device.close()


def _refuse() -> None:
    raise UpdateNotStarted("no update on this device")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"master": "remainder"},
            "there is no option master: .* use the rule adamw-remainder",
        ),
        (
            {"params": [torch.zeros(3, dtype=torch.float16)]},
            "a parameter is torch.float16: adamw-remainder is for",
        ),
        (
            {"params": [torch.zeros(3)]},
            "a parameter is torch.float32: adamw-remainder is for",
        ),
    ],
)
def test_constructor__refuses_what_remainders_do_not_support(
    options: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "params": [torch.zeros(3, dtype=torch.bfloat16)],
        "policy": "pipelined",
        **options,
    }
    params = [param.requires_grad_() for param in arguments.pop("params")]
    with pytest.raises(EngineError, match=message):
        optimizer_of(params, **arguments)
