"""Runs an engine by the plans of a planner, within the available device memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ebbtide.interleave.engine.adaptive.budget import Budget, max_budget, min_budget
from ebbtide.interleave.engine.adaptive.planner import Planner
from ebbtide.interleave.engine.adaptive.probe import probe
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.interrupts import deferred_interrupts
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.device_blocks import gradient_elements
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import OperationFailed
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.state_rows import state_elements
from ebbtide.interleave.engine.runtime.storage.options import StorageOptions
from ebbtide.interleave.model.overlap import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.policies import depends_on_rates, parse
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

log = logging.getLogger("ebbtide")

# After the device ran out of memory, the next plan may use this share of what the last one needed.
_BACK_OFF = 0.8
_CLOSED = "this optimizer is closed, or its state is lost: create a new one"


class AdaptiveRunner:
    """Owns an engine, and replaces its plan when a better one is due or the device runs out of memory.

    Args:
        policy: As for InterleavedAdamW.
        machine: As for InterleavedAdamW.
        budget: The `memory_budget` of InterleavedAdamW.
        threads: As for InterleavedAdamW.
        streamed: Whether gradients are offloaded as soon as they are computed.
        device: The device; None if `open_device` sets it later.
        owns_device: Whether to close the device together with this object.
        storage: Where state goes that host memory does not hold; None: nowhere.
        supported: The overlaps that plans may use: with `forward`, something calls `wait_for_params` before parameters
            are read; with `backward`, something calls `Engine.assume`.

    Attributes:
        policy: The policy.
        kernel: Updates on the CPU.
    """

    def __init__(
        self,
        policy: str,
        machine: Machine | None,
        budget: Budget | None,
        threads: int | None,
        streamed: bool,
        device: Device | None,
        owns_device: bool,
        supported: Overlap = NO_OVERLAP,
        storage: StorageOptions | None = None,
    ) -> None:
        self.policy = policy
        self._is_adaptive = parse(policy).name == "adaptive"
        self._storage = storage
        self._needs_rates = storage is not None or depends_on_rates(policy)
        self._device = device
        self.kernel = CpuKernel(threads)
        self._machine = machine
        self._budget = budget
        self._streamed = streamed
        self._supported = supported
        # To call when the late operations of the last step have ended.
        self._on_finished: Callable[[], None] = _do_nothing
        # Limit of device memory, after it ran out once, in bytes.
        self._memory_limit: float | None = None
        self._state_share = 1.0
        self._engine: Engine | None = None
        self._planner: Planner | None = None
        self._next_plan: Plan | None = None
        self._closers = [self.kernel.close, *([device.close] if device is not None and owns_device else [])]
        self._close = weakref.finalize(self, _call_all, self._closers)
        if device is not None:
            self._bind_threads(device)

    @property
    def device(self) -> Device:
        """The device."""
        assert self._device is not None
        return self._device

    def open_device(self, device: Device) -> None:
        """Use a device from the next `rebuild` on; it is closed together with this object, or by the next call."""
        if not self._close.alive:
            device.close()
            raise EngineError(_CLOSED)
        if self._engine is not None:
            self._closers.remove(self._engine.close)
            self._engine.close()
            self._engine = None
        if self._device is not None:
            self._closers.remove(self._device.close)
            self._device.close()
        self._device = device
        self._closers.append(device.close)
        self._bind_threads(device)

    def _bind_threads(self, device: Device) -> None:
        if device.numa_node is not None:
            self.kernel.bind(device.numa_node)

    def check(self, subgroups: Sequence[Subgroup]) -> None:
        """Check the policy, the machine and the budget before there is a device.

        Raises:
            EngineError, PolicyError, MachineError: If there is no plan for the subgroups.
        """
        if self._machine is not None or not self._needs_rates:
            machine = self._machine or Machine(name="unknown")
            Planner(self.policy, machine, subgroups, self._streamed, self._supported).plan(self._budget)

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineError after `close`."""
        if self._engine is None:
            raise EngineError(_CLOSED)
        return self._engine

    @property
    def has_storage(self) -> bool:
        """Whether state that host memory does not hold goes to storage."""
        return self._storage is not None

    @property
    def storage_written_bytes(self) -> int:
        """Bytes of state written to storage so far."""
        return 0 if self._storage is None else self._storage.written_bytes

    @property
    def closed(self) -> bool:
        """Whether there is no engine, before the first `rebuild` and after `close`."""
        return self._engine is None

    @property
    def is_late(self) -> bool:
        """Whether the late operations of the last step are not known to have ended."""
        return self._engine is not None and self._engine.is_late

    @property
    def planner(self) -> Planner:
        """The planner."""
        assert self._planner is not None
        return self._planner

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        plan = self.engine.plan
        assert plan is not None
        return plan

    def rebuild(
        self,
        subgroups: Sequence[Subgroup],
        params: int,
        host_buffers: Sequence[torch.Tensor] | None = None,
        commit: Mapping[str, Any] | None = None,
    ) -> Engine:
        """Replace the engine by one for other subgroups; the caller then writes its state and calls `set_plan`.

        Args:
            params: Number of parameters (tensors).
            host_buffers: Host memory of the caller for the states; see SubgroupStates.
            commit: What `commit` has returned, whose state the new engine has; None for new state.

        Raises:
            EngineError, PolicyError, MachineError: If there is no plan for the subgroups; nothing is changed. Or a file
                cannot be used.
        """
        total_params = sum(subgroup.params for subgroup in subgroups)
        self._state_share = min(map(_state_share, subgroups), default=1.0)
        has_remainders = any(subgroup.has_remainders for subgroup in subgroups)
        if self._planner is not None:
            # Its rates are corrected by the steps so far.
            machine = self._planner.machine
        elif self._machine is None and self._needs_rates:
            budget = self._budget if self._budget is not None else self.device.free_bytes()
            speculates = self._supported.backward
            host_bytes = None if self._storage is None else self._storage.host_bytes
            machine = probe(
                self.device, self.kernel, total_params, min_budget(budget), speculates, has_remainders, host_bytes
            )
        else:
            machine = self._machine or Machine(name="unknown")
        if self._planner is None:
            machine = replace(machine, storage=()) if self._storage is None else self._storage.added_to(machine)
        planner = Planner(self.policy, machine, subgroups, self._streamed, self._supported)
        plan = planner.plan(self._current_budget())
        dtypes = {(subgroup.grad_dtype, subgroup.dtype) for subgroup in subgroups}
        self.kernel.warm_up(dtypes, self._supported.backward and self._needs_rates, has_remainders)
        self.device.warm_up(dtypes, has_remainders)
        if self._engine is not None:
            # First, since the new one may use its files.
            self._closers.remove(self._engine.close)
            self._engine.close()
            self._engine = None
        stored = None if self._storage is None else self._storage.open(subgroups, self.device, commit)
        engine = Engine(subgroups, params, self.device, self.kernel, host_buffers, stored)
        engine.store.states.plan_storage(plan)
        self._closers.insert(0, engine.close)
        self._engine, self._planner, self._next_plan = engine, planner, plan
        return engine

    def set_plan(self) -> None:
        """Start the current plan from its beginning; after `rebuild` that is the plan for the new engine."""
        self._apply_plan(self._next_plan or self.plan)

    def step(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Scalars | None],
        on_done: Callable[[], None],
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Run `Engine.step`, and make a new plan if one is due.

        If the plan has late operations, `finish_step` must follow before anything else but `wait_for_params`.

        Args:
            on_done: Called when the step is done.
            on_finished: Called when its late operations have ended, too.

        Raises:
            EngineError: If the state is lost, or an operation failed for another reason than device memory.
        """
        self._on_finished = on_finished or _do_nothing
        if self._budget is None:
            # Again after the step: jobs may return memory to the device before it, or use more memory then.
            self.device.sample_memory()
        self._run_to_end(lambda: self.engine.step(values, scalars), on_done)

    def wait_for_params(self, params: Iterable[int]) -> None:
        """Wait until the late operations of the last step have written parameters, by their indices.

        Raises:
            EngineError: As `step`.
        """
        if self.is_late and not self.engine.wait_for_params(params):
            self.finish_step()

    def finish_step(self) -> None:
        """Wait until the late operations of the last step have ended, and make a new plan if one is due.

        Raises:
            EngineError: As `step`.
        """
        if self.is_late:
            self._run_to_end(self.engine.finish_step, _do_nothing)

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    @deferred_interrupts()
    def _run_to_end(self, run: Callable[[], Any], on_done: Callable[[], None]) -> None:
        """Run a step of the engine or the rest of it, and what follows when all its operations have ended.

        Interrupts wait for that: a step that is half done would be lost."""
        failure: OperationFailed | None = None
        try:
            run()
        except OperationFailed as error:
            failure = error
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            raise EngineError(
                f"an update failed midway ({error}) and the optimizer's state is lost: resume from a checkpoint"
            ) from error
        on_done()
        if self.engine.is_late:
            return
        on_finished, self._on_finished = self._on_finished, _do_nothing
        on_finished()
        if failure is not None:
            self._handle_failure(failure)
        elif self.engine.last_schedule is not None:
            self.planner.observe(self.engine.last_schedule)
            budget = self._current_budget()
            reason = self.planner.replan_reason(budget)
            if reason is not None:
                log.info("ebbtide makes a new plan: %s", reason)
                self._replace_plan(budget)

    def commit(self) -> dict[str, Any]:
        """Make the state in storage that to go on with after a crash, after the plan has stopped.

        Returns:
            What `rebuild` takes to go on.

        Raises:
            EngineError: There is no storage, or it is full; the commit before stays.
        """
        if self._storage is None:
            raise EngineError("commit() is for optimizers with storage=: save the state_dict() of others")
        return self._storage.commit_of(self.engine.store.states.commit())

    def close(self) -> None:
        """End the threads and release all memory. Deleting this object does the same."""
        self._close()
        self._engine = None

    def _handle_failure(self, failure: OperationFailed) -> None:
        """Continue with less device memory after a step that was completed on the CPU, or raise for other causes."""
        cause = failure.__cause__
        if isinstance(cause, DeviceMemoryError):
            try:
                self._reduce_memory(cause)
                self._replan()
            except EngineError as error:
                raise EngineError(f"{error} (this step was completed on the CPU)") from cause
            return
        self._replan()
        raise EngineError(f"an operation of the plan failed: {cause}; the step was completed on the CPU") from cause

    def _reduce_memory(self, error: DeviceMemoryError) -> None:
        """Lower the limit of device memory. Raises the error if the plan used none."""
        needed_bytes = self.planner.needed_bytes
        if not needed_bytes:
            raise error
        limit_bytes = self._memory_limit = _BACK_OFF * needed_bytes
        log.warning("ebbtide: %s; from now on at most %s of it are used", error, bytes_text(limit_bytes))

    def _replace_plan(self, budget: Budget | None) -> None:
        """Make a new plan; go on with the current one if it fits and the new one would not."""
        try:
            plan = self.planner.plan(budget)
        except EngineError as error:
            limit = max_budget(budget)
            if limit is not None and limit < self.planner.needed_bytes:
                raise
            log.info("ebbtide goes on with the plan that it has: %s", error)
            return
        self._apply_plan(plan)

    def _replan(self) -> None:
        self._apply_plan(self.planner.plan(self._current_budget()))

    def _apply_plan(self, plan: Plan) -> None:
        """Use a plan from now on, or one that needs less if the device has too little memory for it."""
        engine = self.engine
        self._next_plan = None
        is_same = plan is engine.plan
        try:
            engine.set_plan(plan, self.planner.workload)
        except DeviceMemoryError as error:
            self._reduce_memory(error)
            self._replan()
            return
        if not is_same:
            log.info("ebbtide: policy %s: %s", self.policy, plan.remark or plan.counts())

    def _current_budget(self) -> Budget | None:
        budget = self._budget if self._budget is not None else self._free_bytes()
        if isinstance(budget, Mapping):
            return {phase: self._limited(size) for phase, size in budget.items()}
        return self._memory_limit if budget is None else self._limited(budget)

    def _free_bytes(self) -> float | None:
        """Return the free device memory. For `adaptive` it is 0 before the first step has shown what the job uses. All
        plans of other policies need the same, which the current one has already."""
        free_bytes = self.device.free_bytes()
        if free_bytes is not None and self._planner is not None and not self._is_adaptive:
            return max(free_bytes, self._planner.needed_bytes)
        has_stepped = self._engine is not None and self._engine.last_schedule is not None
        return free_bytes if has_stepped or free_bytes is None or not self._is_adaptive else 0.0

    def _limited(self, size: float) -> float:
        if self._state_share < 1:
            size *= self._state_share
        return size if self._memory_limit is None else min(size, self._memory_limit)


def _state_share(subgroup: Subgroup) -> float:
    """Return the share of the memory that is left for state, if a gradient cannot use the memory of its parameter."""
    return state_elements(subgroup) / (state_elements(subgroup) + gradient_elements(subgroup))


def _do_nothing() -> None:
    """Do nothing."""


def _call_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        close()
