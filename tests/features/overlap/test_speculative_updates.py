"""InterleavedAdamW with updates inside the backward: the bits of the reference, however
often they are in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.features.overlap.test_late_updates import late_optimizer
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import MACHINE, Job, ReferenceOptimizer

pytestmark = pytest.mark.usefixtures("speculating_policy")


@contextmanager
def speculating_optimizer(
    job: Job, text: str = "speculating", **options: Any
) -> Iterator[InterleavedAdamW]:
    with late_optimizer(
        job,
        text,
        "streamed",
        **{"overlap": "backward", "machine": MACHINE, "model": job.net, **options},
    ) as optimizer:
        yield optimizer


def _end_of_updates_beside(optimizer: InterleavedAdamW) -> threading.Event:
    """Return an event that is set after each speculative update."""
    ended = threading.Event()
    update = optimizer._runner.kernel.update_beside

    def update_and_tell(*arguments: Any, **options: Any) -> None:
        update(*arguments, **options)
        ended.set()

    optimizer._runner.kernel.update_beside = update_and_tell  # type: ignore[method-assign]
    return ended


@pytest.mark.slow
def test_step__goes_on_after_a_speculative_update_failed() -> None:
    """It has changed nothing, so the step is completed on the CPU."""
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    with speculating_optimizer(job) as optimizer:
        update, failed = optimizer._runner.kernel.update_beside, threading.Event()
        for step in range(5):
            if step == 3:

                def fail(*arguments: Any) -> None:
                    update(*arguments)
                    failed.set()
                    raise RuntimeError("the update failed")

                optimizer._runner.kernel.update_beside = fail  # type: ignore[method-assign]
                job.net.zero_grad()
                optimizer.scale(job.loss(step)).backward()
                assert failed.wait(30)  # a step that comes first takes the update back
                with pytest.raises(
                    EngineError,
                    match="the update failed; the step was completed on the CPU",
                ):
                    optimizer.step()
                optimizer._runner.kernel.update_beside = update  # type: ignore[method-assign]
            else:
                job.step(optimizer, step)
            same.step(expected, step)
        assert job.outcome() == same.outcome()


def test_last_schedule__has_updates_inside_the_backward_as_speculative_and_others_not() -> (
    None
):
    job = Job()
    with speculating_optimizer(job, max_grad_norm=1e6) as optimizer:
        speculated = _end_of_updates_beside(optimizer)
        for step in range(4):
            speculated.clear()
            job.net.zero_grad()
            job.loss(step).backward()
            assert step < 2 or speculated.wait(30)
            optimizer.step()
        schedule = optimizer.last_schedule
        assert schedule is not None
        backward_end = schedule.iteration_s - schedule.update_s
        updates = [
            (op.is_speculative, start)
            for op, start, _ in schedule.items()
            if op.kind == "update"
        ]
        assert (
            min(start for speculative, start in updates if speculative) < backward_end
        )
        assert all(
            start > backward_end for speculative, start in updates if not speculative
        )


def test_host_bytes__count_the_spares_of_speculated_subgroups() -> None:
    job = Job()
    with (
        speculating_optimizer(job, "speculating:3") as few,
        speculating_optimizer(job, "speculating:0") as none,
    ):
        for optimizer in (few, none):
            job.step(optimizer)
        subgroups = few._runner.engine.store.subgroups
        spares = sum(12 * subgroups[number].params for number in few.plan.speculated)
        assert len(few.plan.speculated) == 3
        assert (
            few._runner.engine.store.host_bytes - none._runner.engine.store.host_bytes
            == spares
        )


@pytest.mark.parametrize(
    "asked",
    [{"policy": "pipelined", "overlap": "auto"}, {"policy": "pipelined,overlap=auto"}],
)
@pytest.mark.parametrize(
    ("gradients", "has_model", "policy"),
    [
        ("streamed", True, "pipelined,overlap=auto"),
        ("streamed", False, "pipelined,overlap=backward"),
        ("kept", True, "pipelined,overlap=forward"),
        ("kept", False, "pipelined"),
    ],
)
def test_optimizer__takes_auto_as_what_gradients_and_model_allow(
    gradients: Any, has_model: bool, policy: str, asked: dict[str, Any]
) -> None:
    job = Job()
    optimizer = InterleavedAdamW(
        job.net.parameters(),
        **asked,
        machine=MACHINE,
        subgroup_params=500,
        gradients=gradients,
        model=job.net if has_model else None,
    )
    with closing(optimizer):
        assert optimizer._runner.options.policy.text == policy
        for step in range(3):
            job.step(optimizer, step)
