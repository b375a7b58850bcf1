"""An engine that goes by a planner's plans, within the device memory that there is."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from ebbtide.interleave.engine.adaptive.planner import Budget, Planner, least
from ebbtide.interleave.engine.adaptive.probe import probe
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import Stopped
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.plan import Plan
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

log = logging.getLogger("ebbtide")

# After the device ran out of memory the next plan takes so much of what the last one took.
_BACK_OFF = 0.8
# Of what a parameter's state takes on the device (12 B) and a gradient beside it that cannot lie in its place (4 B).
_BESIDE_GRADIENTS = 12 / 16


class Driver:
    """policy, machine, budget, threads: as InterleavedAdamW has them. streams: whether gradients leave as soon as they
    are made. owns: whether the device is closed with this."""

    def __init__(
        self,
        policy: str,
        machine: Machine | None,
        budget: Budget | None,
        threads: int | None,
        streams: bool,
        device: Device,
        owns: bool,
    ) -> None:
        self.policy = policy
        self.device = device
        self.kernel = CpuKernel(threads)
        self._machine = machine
        self._budget = budget
        self._streams = streams
        # Of device memory, after it ran out once.
        self._most: float | None = None
        self._share = 1.0
        self._engine: Engine | None = None
        self._planner: Planner | None = None
        self._next: Plan | None = None
        self._closers = [self.kernel.close, *([device.close] if owns else [])]
        self._close = weakref.finalize(self, _call_all, self._closers)

    @property
    def engine(self) -> Engine:
        """Raises EngineError where this was closed."""
        if self._engine is None:
            raise EngineError("this optimizer was closed, or its state is lost: make a new one")
        return self._engine

    @property
    def closed(self) -> bool:
        return self._engine is None

    @property
    def planner(self) -> Planner:
        assert self._planner is not None
        return self._planner

    @property
    def plan(self) -> Plan:
        """The plan that the next step goes by."""
        plan = self.engine.plan
        assert plan is not None
        return plan

    def take(self, subgroups: Sequence[Subgroup], params: int, homes: Sequence[torch.Tensor] | None = None) -> Engine:
        """An engine for these subgroups of so many parameters, in place of the one before; to be given its state, and
        then to be started by `follow`. homes: see Store. Raises EngineError, PolicyError and MachineError where there
        is no plan for them, and changes nothing."""
        total = sum(subgroup.params for subgroup in subgroups)
        self._share = _BESIDE_GRADIENTS if any(of.grad_dtype != of.dtype for of in subgroups) else 1.0
        if self._planner is not None:
            # What its steps have shown by now.
            machine = self._planner.machine
        elif self._machine is None and self.policy == "adaptive":
            room = self._budget if self._budget is not None else self.device.free_bytes()
            machine = probe(self.device, self.kernel, total, least(room))
        else:
            machine = self._machine or Machine(name="unknown")
        planner = Planner(self.policy, machine, subgroups, self._streams)
        plan = planner.plan(self._budget_now())
        engine = Engine(subgroups, params, self.device, self.kernel, homes)
        if self._engine is not None:
            self._closers.remove(self._engine.close)
            self._engine.close()
        self._closers.insert(0, engine.close)
        self._engine, self._planner, self._next = engine, planner, plan
        return engine

    def follow(self) -> None:
        """Go by the plan, from its beginning."""
        self._follow(self._next or self.plan)

    def step(
        self, values: Sequence[torch.Tensor], scalars: Sequence[Scalars | None], count: Callable[[], None]
    ) -> None:
        """Engine.step, and a new plan where it asks for one. count: called when the step is done, which it is after an
        interrupt too, since the engine waits for all of it before it lets that through. Raises EngineError where the
        state is lost, and for an operation that failed for another reason than the device's memory."""
        failure: Stopped | None = None
        try:
            self.engine.step(values, scalars)
        except Stopped as stopped:
            failure = stopped
        except KeyboardInterrupt:
            count()
            raise
        except Exception as error:
            self.close()
            raise EngineError(
                f"an update broke off ({error}) and the optimizer's state is lost: go on from a checkpoint"
            ) from error
        count()
        if failure is not None:
            self._after(failure)
        elif self.engine.last is not None:
            self.planner.observe(self.engine.last)
            reason = self.planner.drifted(self._budget_now())
            if reason is not None:
                log.info("ebbtide plans anew: %s", reason)
                self._plan()

    def close(self) -> None:
        """End threads and give all memory back. Deleting this does the same."""
        self._close()
        self._engine = None

    def _after(self, failure: Stopped) -> None:
        """The step is done, on the CPU; go on with less device memory where that was the trouble, else say so."""
        cause = failure.__cause__
        if isinstance(cause, DeviceMemoryError):
            try:
                self._take_less(cause)
                self._plan()
            except EngineError as error:
                raise EngineError(f"{error} (this step was done all the same, on the CPU)") from cause
            return
        self._plan()
        raise EngineError(
            f"an operation of the plan failed: {cause}; the step was done all the same, on the CPU"
        ) from cause

    def _take_less(self, error: DeviceMemoryError) -> None:
        """Of the device's memory. Raises the error where nothing was taken."""
        needed = self.planner.needed_bytes
        if not needed:
            raise error
        less = self._most = _BACK_OFF * needed
        log.warning("ebbtide: %s; from now on at most %s of it are used", error, bytes_text(less))

    def _plan(self) -> None:
        self._follow(self.planner.plan(self._budget_now()))

    def _follow(self, plan: Plan) -> None:
        """Go by a plan from now on, or by one that takes less where the device has no room for it."""
        engine = self.engine
        self._next = None
        known = plan is engine.plan
        try:
            engine.follow(plan, self.planner.workload)
        except DeviceMemoryError as error:
            self._take_less(error)
            self._plan()
            return
        if not known:
            log.info("ebbtide: policy %s: %s", self.policy, plan.remark or plan.counts())

    def _budget_now(self) -> Budget | None:
        budget = self._budget if self._budget is not None else self._left()
        if isinstance(budget, Mapping):
            return {phase: self._limited(size) for phase, size in budget.items()}
        return self._most if budget is None else self._limited(budget)

    def _left(self) -> float | None:
        """What the device has left. Before the first step the job has not shown yet what it takes itself, and whoever
        has a choice takes nothing."""
        left = self.device.free_bytes()
        seen = self._engine is not None and self._engine.last is not None
        return left if seen or left is None or self.policy != "adaptive" else 0.0

    def _limited(self, size: float) -> float:
        if self._share < 1:
            size *= self._share
        return size if self._most is None else min(size, self._most)


def _call_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        close()
