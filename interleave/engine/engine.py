"""State, executor and plan together: one step after the other, each by the plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ebbtide.interleave.engine.device import Device
from ebbtide.interleave.engine.executor import Executor, Stopped
from ebbtide.interleave.engine.kernels import CpuKernel
from ebbtide.interleave.engine.layout import Subgroup
from ebbtide.interleave.engine.store import Inputs, Store
from ebbtide.interleave.plan import BACKWARD, STEP, UPDATE, Plan
from ebbtide.interleave.schedule import Schedule
from ebbtide.interleave.workload import Workload


class Engine:
    """Runs a plan at every step. The training thread alone calls it.

    subgroups: how the parameters divide. last: the schedule of the last step, as measured."""

    def __init__(self, subgroups: Sequence[Subgroup], device: Device, kernel: CpuKernel) -> None:
        self.store = Store(subgroups, device, kernel)
        self.device = device
        self.last: Schedule | None = None
        self._executor = Executor(self.store.perform)
        self._plan: Plan | None = None
        self._workload: Workload | None = None
        self._under_way = False
        self._backward_s: float | None = None

    @property
    def plan(self) -> Plan | None:
        return self._plan

    def follow(self, plan: Plan, workload: Workload) -> None:
        """Go by this plan from now on; what it moves before the next step begins to move."""
        self.rest()
        self._plan, self._workload = plan, workload
        self._begin()

    def rest(self) -> None:
        """Let nothing be under way, so that state can be read and written."""
        self._executor.stop()
        self._under_way = False

    def reach(self, made: float) -> None:
        """The backward has made such a share of the gradients."""
        if self._backward_s is None:
            self._backward_s = time.perf_counter()
        if self._under_way:
            self._executor.reach(min(BACKWARD + made, UPDATE - 1e-9))

    def step(self, inputs: Inputs) -> Schedule:
        """Update all parameters; returns what was measured. Where an operation of the plan fails, the step is done
        all the same, on the CPU, and the failure is raised as Stopped; where that is not possible, the state is lost,
        which EngineError says."""
        assert self._plan is not None
        assert self._workload is not None
        if not self._under_way:
            self._begin()
        self.device.wait()
        called = time.perf_counter()
        self.store.inputs = inputs
        self._executor.reach(UPDATE)
        self._executor.reach(STEP)
        try:
            run = self._executor.finish()
        except Stopped as stopped:
            self._under_way = False
            self.store.complete(stopped.run.plan, stopped.run.done)
            raise
        finally:
            # Nothing here keeps gradients alive that the job lets go.
            self.store.inputs = Inputs([])
        end = time.perf_counter() - run.begin_s
        step = called - run.begin_s
        backward = min((self._backward_s or called) - run.begin_s, step)
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
        self.store.release()
        self.device.close()

    def _begin(self) -> None:
        assert self._plan is not None
        if not self._under_way:
            self.store.settle(self._plan)
        self._backward_s = None
        self._executor.begin(self._plan)
        self._executor.reach(0.0)
        self._under_way = True


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
