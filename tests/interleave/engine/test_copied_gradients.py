"""Gradients that are copied in the backward and stay with the job: any job has the bits
of kept gradients, and copies that are still right are not made again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.runtime.update import Update
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import Job, maker

WARM, STEPS = 2, 6
LIMIT_S = 120
POLICIES = (
    *("zero-offload", "interleaved:2", "twin-flow:0.4"),
    *("pipelined,overlap=backward", "adaptive,overlap=backward"),
)


def clip(job: Job) -> None:
    torch.nn.utils.clip_grad_norm_(job.net.parameters(), 0.1)


def clip_loosely(job: Job) -> None:
    torch.nn.utils.clip_grad_norm_(job.net.parameters(), 1e6)


def double_one(job: Job) -> None:
    job.net.late.weight.grad *= 2


def replace_one(job: Job) -> None:
    job.net.late.weight.grad = torch.ones_like(job.net.late.weight)


def drop_one(job: Job) -> None:
    job.net.late.weight.grad = None


def run_backward_again(job: Job) -> None:
    job.loss().backward()


def begin_again(job: Job) -> None:
    job.net.zero_grad()
    job.loss().backward()


EDITS = (clip, clip_loosely, double_one, replace_one, drop_one)
BACKWARDS = (run_backward_again, begin_again)


def wait_for_copies(optimizer: InterleavedAdamW) -> Update:
    """Wait until gradients are on the host, and all speculative updates are done. Those
    of the first subgroup are ready when the backward ends, which the step tells."""
    engine = optimizer._runner.engine
    assert engine.plan is not None
    wanted = {op.subgroup for op in engine.plan.ops if op.kind == "gradient down"} - {0}
    end_s = time.monotonic() + LIMIT_S
    while not engine.update.copies.keys() >= wanted and time.monotonic() < end_s:
        time.sleep(0.001)
    assert engine.update.copies.keys() >= wanted
    while engine._executor._busy and time.monotonic() < end_s:
        time.sleep(0.001)
    return engine.update


def train(
    edit: Callable[[Job], None] | None, policy: str, mode: str, **options: Any
) -> tuple[Job, list[float | None]]:
    """Run steps with an edit of the gradients in every second one; return the job, and
    the share of stale copies by step."""
    job, shares = Job(), []
    params = [
        param
        for name, param in job.net.named_parameters()
        if not name.startswith(("branches.1", "branches.2"))
    ]
    with closing(maker(policy, mode, **options)(params)) as optimizer:
        for step in range(STEPS):
            job.net.zero_grad()
            job.loss().backward()
            update = None
            if mode == "copied" and step >= WARM and edit not in BACKWARDS:
                update = wait_for_copies(optimizer)
            if edit is not None and step % 2:
                edit(job)
            optimizer.step()
            if update is not None:
                shares.append(update.stale_share)
    return job, shares


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("edit", [None, *EDITS, *BACKWARDS])
def test_copied__has_the_bits_of_kept_gradients(
    policy: str, edit: Callable[[Job], None] | None
) -> None:
    expected, _ = train(edit, "zero-offload", "kept")
    job, _ = train(edit, policy, "copied", memory_budget=20e3)
    assert job.outcome() == expected.outcome()


def test_copied__copies_again_what_has_changed_alone() -> None:
    for edit in (None, clip_loosely, drop_one):
        assert set(train(edit, "zero-offload", "copied")[1]) == {0.0}
    # Before the step, in every second one.
    assert train(clip, "zero-offload", "copied")[1] == [0.0, 1.0] * 2
    _, shares = train(double_one, "zero-offload", "copied")
    assert shares[0::2] == [0.0, 0.0]
    assert all(share is not None and 0 < share < 1 for share in shares[1::2])


class HaltingDevice(EmulatedDevice):
    """A device whose copies to the host call a function in their middle."""

    between: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], None] | None = None

    def run_copies(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        if direction == "h2d" or self.between is None:
            super().run_copies(direction, pairs)
            return
        halves = [
            [(source[half], target[half]) for source, target in pairs]
            for half in (slice(None, 10), slice(10, None))
        ]
        super().run_copies(direction, halves[0])
        self.between(pairs)
        super().run_copies(direction, halves[1])


def test_copied__notices_a_copy_of_values_that_were_there_in_between() -> None:
    """The job changes gradients while they are copied, and changes them back before the
    step: both its values and the numbers of versions tell nothing."""

    def scaled(factor: float, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(factor)

    outcomes = []
    for is_torn in (False, True):
        job, device = Job(), HaltingDevice()
        with closing(
            maker("zero-offload", "copied", device=device)(
                [*job.net.first.parameters(), *job.net.late.parameters()]
            )
        ) as optimizer:
            for step in range(STEPS):
                job.net.zero_grad()
                torn: list[torch.Tensor] = []
                if is_torn and step >= WARM:

                    def tear(pairs: Any, torn: list[torch.Tensor] = torn) -> None:
                        sources = [source for source, _ in pairs]
                        scaled(2.0, sources)
                        torn.extend(sources)

                    device.between = tear
                job.loss().backward()
                if step >= WARM:
                    update = wait_for_copies(optimizer)
                device.between = None
                scaled(0.5, torn)
                optimizer.step()
                if step >= WARM:
                    assert update.stale_share == float(is_torn)
            outcomes.append(job.outcome())
        device.close()
    assert outcomes[0] == outcomes[1]


def test_copied__copies_at_the_step_where_gradients_always_change() -> None:
    job = Job()
    with closing(maker("zero-offload", "copied")(job.net.parameters())) as optimizer:
        early = []
        for step in range(60):
            job.net.zero_grad()
            job.loss().backward()
            early.append(optimizer.workload.copies_gradients_early)
            if early[-1] and step >= WARM and step < 40:
                update = optimizer._runner.engine.update
                end_s = time.monotonic() + LIMIT_S
                while not update.copies and time.monotonic() < end_s:
                    time.sleep(0.001)
            if step < 40:
                clip(job)
            optimizer.step()
    assert early[0]
    assert not early[39]


def test_gradients__are_of_a_known_kind() -> None:
    with pytest.raises(Exception, match="'kept', 'copied' or 'streamed'"):
        maker("zero-offload", "moved")(Job().net.parameters())
