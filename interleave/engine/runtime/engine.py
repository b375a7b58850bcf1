"""State, executor and plan together: one step after the other, each by the plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.executor import Executor, Stopped
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.store import Inputs, Store
from ebbtide.interleave.engine.runtime.trace_recording import tell
from ebbtide.interleave.model.plan import BACKWARD, STEP, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload

# The backward is not over before the job says so by calling step.
_ALMOST = UPDATE - 1e-9
# Beside the subgroups' numbers, what is provided when a step's scalars are there.
_SCALARS = -1


class Engine:
    """Runs a plan at every step, for so many parameters, which divide into subgroups. The training thread calls it;
    `reach` and `take` are called by autograd's. homes: see Store.

    last: the schedule of the last step, as measured."""

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        params: int,
        device: Device,
        kernel: CpuKernel,
        homes: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.store = Store(subgroups, device, kernel, homes)
        self.device = device
        self.last: Schedule | None = None
        self._params = params
        self._executor = Executor(self.store.perform)
        self._plan: Plan | None = None
        self._workload: Workload | None = None
        self._under_way = False
        self._backward_s: float | None = None
        self._called_s = 0.0
        # Whose gradients this iteration has been given already.
        self._taken: set[int] = set()
        self._missing: list[int] = []

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def under_way(self) -> bool:
        """Whether this iteration's plan runs."""
        return self._under_way

    @property
    def taken(self) -> frozenset[int]:
        """The parameters whose gradients have been taken in this iteration."""
        return frozenset(self._taken)

    def follow(self, plan: Plan, workload: Workload) -> None:
        """Go by this plan from now on; what it moves before the next step begins to move."""
        self.rest()
        self._plan, self._workload = plan, workload
        self._begin()

    def rest(self) -> None:
        """Let nothing be under way, so that state can be read and written. The next step begins the plan anew."""
        self._executor.stop()
        self._under_way = False

    def reach(self, made: float) -> None:
        """The backward has made such a share of the gradients."""
        if self._backward_s is None:
            self._backward_s = time.perf_counter()
        if self._under_way:
            self._executor.reach(min(BACKWARD + made, _ALMOST))

    def take(self, param: int, gradient: torch.Tensor) -> None:
        """A gradient (flat) is made, as far as this thread has issued: it may leave from now on. Of plans that do not
        wait for the step with it."""
        inputs = self.store.inputs
        inputs.gradients[param] = gradient
        inputs.marks[param] = self.device.mark()
        self._taken.add(param)
        for subgroup in self.store.subgroups_of(param):
            self._missing[subgroup] -= 1
            if not self._missing[subgroup]:
                self._executor.provide(subgroup)

    def give_back(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The gradients that were taken, flat and on the device; they are as if they had not been."""
        self.rest()
        self.device.wait()
        found = {param: self.store.gradient(param, params[param]) for param in sorted(self._taken)}
        self._taken.clear()
        return {param: gradient for param, gradient in found.items() if gradient is not None}

    def drop(self) -> None:
        """This iteration has no step after all: forget its gradients."""
        self.rest()
        self._begin()

    def give(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """The backward is over: the gradients (flat) that were not taken yet. They begin to come down."""
        if not self._under_way:
            self._begin()
        self.device.wait()
        self._called_s = time.perf_counter()
        for param, gradient in gradients.items():
            self.store.inputs.gradients[param] = gradient
        for subgroup in range(len(self.store.subgroups)):
            self._executor.provide(subgroup)
        self._executor.reach(UPDATE)

    def step(self, values: Sequence[torch.Tensor], scalars: Sequence[Scalars | None]) -> Schedule:
        """Update all parameters, after `give`; returns what was measured. values: the parameters, flat. scalars: None
        for a parameter that this step leaves alone.

        Where an operation of the plan fails, the step is done all the same, on the CPU, and the failure is raised as
        Stopped; where that is not possible, the state is lost, and that is raised."""
        assert self._plan is not None
        assert self._workload is not None
        inputs = self.store.inputs
        inputs.values, inputs.scalars = list(values), list(scalars)
        self._executor.provide(_SCALARS)
        self._executor.reach(STEP)
        try:
            run = self._executor.finish()
        except Stopped as stopped:
            self._under_way = False
            self.store.complete(stopped.run.plan, stopped.run.done)
            raise
        except KeyboardInterrupt:
            self._under_way = False
            raise
        finally:
            self._taken.clear()
        end = time.perf_counter() - run.begin_s
        tell(run)
        step = self._called_s - run.begin_s
        backward = min((self._backward_s or self._called_s) - run.begin_s, step)
        job = replace(self._workload, other_s=0.0, forward_s=max(0.0, backward), backward_s=max(0.0, step - backward))
        self.last = Schedule(
            plan=self._plan,
            workload=job,
            starts=run.starts,
            ends=run.ends,
            other_s=0.0,
            forward_s=job.forward_s,
            backward_s=job.backward_s,
            update_s=end - step,
        )
        self._begin()
        return self.last

    def close(self) -> None:
        """End threads and give all memory back."""
        self._executor.close()
        self.store.inputs = Inputs([])
        self.store.release()

    def _begin(self) -> None:
        assert self._plan is not None
        assert self._workload is not None
        if not self._under_way:
            self.store.settle(self._plan)
        streams = not self._workload.gradients_stay
        # New inputs: nothing here keeps gradients alive that the job lets go.
        self.store.inputs = Inputs([], [None] * self._params, [None] * self._params, streams=streams)
        self._taken.clear()
        self._missing = [len({piece.param for piece in of.pieces}) for of in self.store.subgroups]
        self._backward_s = None
        held = {index: op.subgroup for index, op in enumerate(self._plan.ops) if op.kind == "gradient down"}
        # What works with the step's scalars waits for them, whatever its point.
        held |= {index: _SCALARS for index, op in enumerate(self._plan.ops) if op.kind in ("clip", "update")}
        self._executor.begin(self._plan, held)
        self._executor.reach(0.0)
        self._under_way = True
