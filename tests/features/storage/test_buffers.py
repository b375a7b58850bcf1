"""Buffers of state in storage: while the engine runs any valid plan, each has the state
of one subgroup at a time."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.features.overlap.policy import late
from ebbtide.features.storage.engine.stored_states import StoredStates
from ebbtide.features.storage.policy import StorageLayout, stored_in
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.plan import OTHER, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine, StoragePath
from tests.conftest import examples
from tests.interleave.engine.plans import plans, workload_of
from tests.interleave.engine.twins import (
    Jitter,
    JitteryDevice,
    JitteryKernel,
    Twin,
    hasty_switches,
    twins,
)

MACHINE = Machine(storage=(StoragePath(1e9, 1e9),))


class WatchedStates(StoredStates):
    """State in a file, with slow reads and writes. It notes what is read into a buffer
    that has a state."""

    def __init__(self, jitter: Jitter, *args: Any) -> None:
        super().__init__(*args)
        self._jitter = jitter
        self._owners: dict[int, int] = {}
        self.faults: list[str] = []

    def load(self, subgroup: int, number: int) -> torch.Tensor:
        if number in self._owners:
            self.faults.append(
                f"{subgroup} is read into the buffer of {self._owners[number]}"
            )
        self._owners[number] = subgroup
        self._jitter()
        return super().load(subgroup, number)

    def save(self, subgroup: int) -> None:
        super().save(subgroup)
        self._jitter()
        self._owners = {
            number: owner for number, owner in self._owners.items() if owner != subgroup
        }


@st.composite
def stored_plans(draw: st.DrawFn, workload: Workload) -> Plan:
    """Draw a valid plan with state in storage; in many, operations begin before the
    backward."""
    plan = draw(plans(workload))
    if draw(st.booleans()):
        plan = late(plan, workload)
    plan = stored_in(
        plan, workload, MACHINE, StorageLayout("spread", draw(st.integers(1, 3)))
    )
    assume(plan.stored)
    try:
        return plan.validate(workload)
    except PlanError:
        # Operations before the backward, of a subgroup whose late write this layout
        # leaves until then.
        assume(False)
        raise


@given(twins(mixed=False), st.data(), st.integers(0, 2**32))
@settings(max_examples=examples(40, by_default=8))
def test_engine__gives_no_buffer_to_two_states(
    twin: Twin, data: st.DataObject, seed: int
) -> None:
    """The next iteration begins when late operations of the one before have ended: its
    reads find free buffers."""
    jitter = Jitter(seed, 2e-3)
    width = max(subgroup.dtype.itemsize for subgroup in twin.subgroups)
    workload = replace(workload_of(twin.sizes, True, False, width), host_free_bytes=0.0)
    plan = data.draw(stored_plans(workload))
    with tempfile.TemporaryDirectory() as folder, hasty_switches():
        device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
        stored = WatchedStates(
            jitter, [Path(folder) / "state"], twin.subgroups, device, bytes(16)
        )
        engine = Engine(
            Store(twin.subgroups, device, kernel, None, stored), len(twin.params)
        )
        try:
            engine.store.states.backed.prepare(plan)
            twin.begin(engine.store)
            engine.set_plan(plan, workload)
            for _ in range(3):
                update = twin.update(0.75)
                engine.report_progress(OTHER)
                jitter()
                engine.submit_gradients(
                    {i: g for i, g in enumerate(update.gradients) if g is not None}
                )
                engine.step(update.values, update.scalars)
                if plan.has_late_operations:
                    engine.finish_step()
                twin.check()
            assert not stored.faults
            engine.quiesce()
            twin.check(engine.store)
        finally:
            engine.close()
            device.close()
            kernel.close()
