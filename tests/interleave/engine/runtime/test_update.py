"""The phases of an update: each question about the state of a step is one about its
update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ebbtide.features.overlap.policy import late
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import OperationFailed
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.engine.runtime.update import UpdatePhase
from tests.interleave.engine.plans import make, workload_of
from tests.interleave.engine.twins import Twin


@contextmanager
def engine_of(twin: Twin, is_late: bool = False) -> Iterator[Engine]:
    """Yield an engine that runs a plan of updates on the CPU, which may end late."""
    device, kernel = EmulatedDevice(), CpuKernel(1)
    engine = Engine(Store(twin.subgroups, device, kernel), len(twin.params))
    workload = workload_of(twin.sizes, clipping=True, gradients_held_until_step=False)
    plan = make(workload, ["cpu"] * len(twin.sizes))
    try:
        twin.begin(engine.store)
        engine.set_plan(late(plan, workload) if is_late else plan, workload)
        yield engine
    finally:
        engine.close()
        device.close()
        kernel.close()


def twin_of() -> Twin:
    return Twin([60, 60], [torch.bfloat16] * 2, 40, 1)


def gradients_of(twin: Twin) -> tuple[dict[int, torch.Tensor], list[object]]:
    expected = twin.update()
    gradients = {
        index: one for index, one in enumerate(expected.gradients) if one is not None
    }
    return gradients, expected.scalars


def test_update__is_open_submitted_decided_and_ended() -> None:
    twin = twin_of()
    with engine_of(twin) as engine:
        first = engine.update
        gradients, scalars = gradients_of(twin)
        offloaded = min(gradients)
        engine.offload_gradient(offloaded, gradients.pop(offloaded))
        assert (first.phase, first.offloaded) == (UpdatePhase.OPEN, {offloaded})
        engine.submit_gradients(gradients)
        assert first.phase is UpdatePhase.SUBMITTED
        engine.step(twin.params, scalars)
        twin.check()
        assert (first.phase, first.unfinished) == (UpdatePhase.ENDED, set())
        assert (engine.update.phase, engine.update.number) == (
            UpdatePhase.OPEN,
            first.number + 1,
        )


def test_update__is_late_until_its_last_operation_has_ended() -> None:
    twin = twin_of()
    with engine_of(twin, is_late=True) as engine:
        own = engine.update
        gradients, scalars = gradients_of(twin)
        engine.submit_gradients(gradients)
        assert engine.step(twin.params, scalars) is None
        assert engine.is_late
        engine.finish_step()
        twin.check()
        assert own.phase is UpdatePhase.ENDED


def test_update__that_is_dropped_ends_and_has_a_number() -> None:
    twin = twin_of()
    with engine_of(twin) as engine:
        dropped = engine.update
        gradients, scalars = gradients_of(twin)
        engine.submit_gradients(gradients)
        engine.discard()
        assert dropped.phase is UpdatePhase.ENDED
        engine.submit_gradients(gradients)
        engine.step(twin.params, scalars)
        twin.check()
        assert engine.update.number == dropped.number + 2


@pytest.mark.parametrize("phase", [UpdatePhase.RECOVERED, UpdatePhase.LOST])
def test_update__is_recovered_or_lost_after_a_failure(
    phase: UpdatePhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that fails is made again; nobody knows what an update that fails has
    changed."""
    twin = twin_of()
    with engine_of(twin) as engine:
        own, store = engine.update, engine.store
        gradients, scalars = gradients_of(twin)
        owner, name = (
            (store, "copy_params_to_device")
            if phase is UpdatePhase.RECOVERED
            else (store._kernel, "_run")
        )
        working = getattr(owner, name)

        def fail_once(*_: object) -> None:
            monkeypatch.setattr(owner, name, working)
            raise RuntimeError("broken")

        monkeypatch.setattr(owner, name, fail_once)
        engine.submit_gradients(gradients)
        with pytest.raises(EngineError, match="failed") as failure:
            engine.step(twin.params, scalars)
        assert own.phase is phase
        assert isinstance(failure.value, OperationFailed) == (
            phase is UpdatePhase.RECOVERED
        )
        if phase is UpdatePhase.RECOVERED:
            twin.check()
