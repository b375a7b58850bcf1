"""InterleavedAdamW with updates under the next forward: the bits of the reference,
whatever the job reads when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ebbtide.errors import PolicyError
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from tests.interleave.engine.training import (
    MACHINE,
    MODES,
    Job,
    ReferenceOptimizer,
    run,
    throttle_cpu,
)


@contextmanager
def late_optimizer(
    job: Job, policy: str, mode: str, **options: Any
) -> Iterator[InterleavedOptimizer]:
    """Return an optimizer whose updates on the CPU are slow, so that steps return long
    before they have ended."""
    arguments: dict[str, Any] = {
        "subgroup_params": 500,
        "threads": 1,
        "overlap": "forward",
        "model": job.net,
        **options,
    }
    if policy == "adaptive":
        arguments |= {"machine": MACHINE, "memory_budget": 20e3}
    optimizer = InterleavedOptimizer(
        job.net.parameters(), policy=policy, gradients=mode, **arguments
    )
    throttle_cpu(optimizer, lambda: 2e6)
    try:
        yield optimizer
    finally:
        optimizer.close()


@contextmanager
def remainder_optimizer(
    job: Job, policy: str, mode: str, **options: Any
) -> Iterator[InterleavedOptimizer]:
    with late_optimizer(
        job, policy, mode, rule="adamw-remainder", **options
    ) as optimizer:
        yield optimizer


def test_state_dict__has_no_remainders_of_what_the_forward_has_written() -> None:
    """A module writes to its parameter as it runs, as an embedding with a maximum norm,
    while other updates run."""
    job = Job(torch.bfloat16)
    with remainder_optimizer(job, "pipelined", "kept") as optimizer:
        for _ in range(3):
            job.step(optimizer)
        weight = job.net.last.weight
        job.net.last.register_forward_hook(lambda *_: _halve(weight))
        job.loss()
        number = [id(param) for param in job.net.parameters()].index(id(weight))
        master = optimizer.state_dict()["state"][number]["master"]
        assert torch.equal(master, weight.detach().float().view_as(master))


def _halve(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def test_step__returns_before_the_updates_have_ended_and_the_forward_waits() -> None:
    job = Job()
    with late_optimizer(job, "pipelined", "kept") as optimizer:
        job.step(optimizer)
        optimizer.synchronize()
        entered, release = threading.Event(), threading.Event()
        update = optimizer._runner.kernel.update_ranges

        def wait_and_update(*arguments: Any) -> None:
            entered.set()
            assert release.wait(30)
            update(*arguments)

        optimizer._runner.kernel.update_ranges = wait_and_update  # type: ignore[method-assign]
        job.step(optimizer)
        # The step has returned while the first update is still waiting.
        assert entered.wait(30)
        with torch._C.DisableTorchFunctionSubclass():
            before = job.net.last.bias.detach().clone()
        threading.Timer(0.2, release.set).start()
        job.loss()
        assert release.is_set()
        assert not torch.equal(before, job.net.last.bias)


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)]
)
def test_step__gives_the_same_bits_in_a_model_compiled_before(backend: str) -> None:
    """Code compiled before the hooks existed would not wait."""

    def losses(late: bool) -> list[float]:
        job = Job(torch.float32)
        compiled = torch.compile(job.net, backend=backend)
        job.net, plain = compiled, job.net
        job.loss()
        options: dict[str, Any] = {} if late else {"overlap": "none", "model": None}
        job.net = plain
        with late_optimizer(job, "pipelined", "kept", **options) as optimizer:
            job.net = compiled
            for _ in range(4):
                job.step(optimizer)
            job.net = plain
        return job.losses

    assert losses(late=True) == losses(late=False)


def test_last_schedule__has_ends_beyond_the_iteration_and_no_waiting_in_the_update() -> (
    None
):
    job = Job()
    with late_optimizer(job, "pipelined", "streamed") as optimizer:
        for step in range(4):
            job.step(optimizer, step)
        optimizer.synchronize()
        returned = threading.Event()
        update = optimizer._runner.kernel.update_ranges

        def update_later(*arguments: Any) -> None:
            assert returned.wait(30)
            update(*arguments)

        optimizer._runner.kernel.update_ranges = update_later  # type: ignore[method-assign]
        job.step(optimizer, 4)
        returned.set()
        optimizer.synchronize()
        schedule = optimizer.last_schedule
        assert schedule is not None
        late = [end for op, _, end in schedule.items() if op.is_late]
        assert late
        assert max(late) > schedule.iteration_s
        assert all(
            end <= schedule.iteration_s + 1e-6
            for op, _, end in schedule.items()
            if not op.is_late
        )


def test_step__goes_on_after_an_operation_failed_under_the_forward() -> None:
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    with late_optimizer(job, "pipelined", "kept", device=EmulatedDevice()) as optimizer:
        copy = optimizer._runner.device.copy
        failing = iter([True])

        def fail_once(direction: str, pairs: Any) -> None:
            if direction == "h2d" and next(failing, False):
                raise RuntimeError("the copy failed")
            copy(direction, pairs)

        for step in range(2):
            job.step(optimizer, step)
            same.step(expected, step)
        optimizer.synchronize()
        optimizer._runner.device.copy = fail_once  # type: ignore[method-assign]

        def step_to_its_end() -> None:
            job.step(optimizer, 2)
            optimizer.synchronize()

        same.step(expected, 2)
        # It is raised where something waits, or by the step itself; the update is
        # complete then.
        with pytest.raises(
            EngineError, match="the copy failed; the step was completed on the CPU"
        ):
            step_to_its_end()
        job.step(optimizer, 3)
        same.step(expected, 3)
        optimizer.synchronize()
        assert job.outcome() == same.outcome()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": None}, EngineError, "need the module whose forward waits"),
        (
            {"overlap": "late"},
            EngineError,
            "overlap is 'late': it must be one of none, forward, backward, both, auto",
        ),
        (
            {"overlap": "both"},
            EngineError,
            "updates inside the backward need gradients='copied' or gradients='streamed'",
        ),
        ({"policy": "gpu-only"}, PolicyError, "no option 'overlap=forward'"),
        ({"model": 3}, EngineError, "model is 3: it must be the torch.nn.Module"),
        (
            {"policy": "pipelined,overlap=none"},
            EngineError,
            "must not contradict each other",
        ),
    ],
)
def test_optimizer__refuses_what_late_updates_do_not_support(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    job = Job()
    arguments = {
        "policy": "pipelined",
        "overlap": "forward",
        "model": job.net,
        **options,
    }
    with pytest.raises(error, match=message):
        InterleavedOptimizer(job.net.parameters(), subgroup_params=500, **arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["zero-offload", "twin-flow:0.5", "gpu-only"])
def test_auto__is_none_for_policies_without_overlap(policy: str, mode: Any) -> None:
    outcomes = []
    for overlap in ("none", "auto"):
        job = Job()
        optimizer = InterleavedOptimizer(
            job.net.parameters(),
            policy=policy,
            gradients=mode,
            overlap=overlap,  # type: ignore[arg-type]
            model=job.net,
            machine=MACHINE,
        )
        outcomes.append(run(job, optimizer, 3))
    assert outcomes[0] == outcomes[1]
