"""The engine: state, executor and plan together, for one step after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ebbtide.interleave.engine.devices.device import Device, Mark
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.device_blocks import block_sizes, worst_case
from ebbtide.interleave.engine.runtime.executor import Executor, OperationFailed
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.step_clock import StepClock
from ebbtide.interleave.engine.runtime.step_inputs import StepInputs
from ebbtide.interleave.engine.runtime.storage.stored_states import StoredStates
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.engine.runtime.trace_recording import record_operations, reserve_rows
from ebbtide.interleave.model.plan import BACKWARD, STEP, UPDATE, WRITES_PARAMETERS, Plan
from ebbtide.interleave.model.schedule import MeasuredBytes, Schedule
from ebbtide.interleave.model.workload import Workload

# The latest point that the gradients can report: the backward is over only when the job calls step.
_BACKWARD_END = UPDATE - 1e-9
# Inputs of operations besides gradients, which have the number of their subgroup: the scalars of the step, and those
# that speculative updates assume before.
_SCALARS, _ASSUMED_SCALARS = -1, -2
# Operations that use the scalars, or write parameters, which the backward reads.
_STEP_KINDS = ("clip", "gradient up", "update", "upload")


class Engine:
    """Runs a plan at every step, on parameters that are divided into subgroups.

    The training thread calls it; autograd's thread calls `report_progress` and `offload_gradient`.

    Args:
        subgroups: The subgroups.
        params: Number of parameters (tensors).
        device: The device.
        kernel: Updates on the CPU.
        host_buffers: Host memory of the caller for the states; see SubgroupStates.
        stored: Files for state; see SubgroupStates. They are closed together with this object.

    Attributes:
        store: The state, and the operations on it.
        device: The device.
        last_schedule: The measured schedule of the last step; None before the first.
    """

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        params: int,
        device: Device,
        kernel: CpuKernel,
        host_buffers: Sequence[torch.Tensor] | None = None,
        stored: StoredStates | None = None,
    ) -> None:
        self.store = Store(subgroups, device, kernel, host_buffers, stored)
        self.device = device
        self.last_schedule: Schedule | None = None
        self._params = params
        self._executor = Executor(
            self.store.perform, device, self.store.fits, self.store.end, 0 if stored is None else stored.path_count
        )
        self._plan: Plan | None = None
        self._workload: Workload | None = None
        self._speculates = False
        self._block_sizes: list[int] = []
        self._is_running = False
        self._clock = StepClock()
        # Of the last step, for the trace that is recorded.
        self._row_numbers: list[int] = []
        # Bytes read from and written to storage before this iteration.
        self._storage_before = (0, 0)
        # Late operations that write the parameters of each subgroup.
        self._late_writes: list[list[int]] = []
        # Parameters whose gradients were offloaded in this iteration, before the step.
        self._offloaded_params: set[int] = set()
        # Number of parameters of each subgroup whose gradients were not offloaded yet; marks behind those that were.
        self._missing: list[int] = []
        self._gradient_marks: list[list[Mark]] = []

    @property
    def plan(self) -> Plan | None:
        """The plan of the next step."""
        return self._plan

    @property
    def is_running(self) -> bool:
        """Whether the plan of this iteration is running."""
        return self._is_running

    @property
    def offloaded_params(self) -> frozenset[int]:
        """The parameters whose gradients were offloaded in this iteration."""
        return frozenset(self._offloaded_params)

    @property
    def is_late(self) -> bool:
        """Whether the last step has returned and its late operations are not known to have ended: see `finish_step`."""
        return self._clock.returned_s is not None

    def set_plan(self, plan: Plan, workload: Workload) -> None:
        """Use a plan from now on, and start the operations that it has before the next step."""
        self.quiesce()
        self._plan, self._workload = plan, workload
        self._block_sizes = block_sizes(worst_case(plan, workload), self.store.subgroups)
        self._speculates = bool(plan.speculated)
        self._late_writes = [[] for _ in self.store.subgroups]
        for index, op in enumerate(plan.ops):
            if op.due is not None and op.kind in WRITES_PARAMETERS:
                self._late_writes[op.subgroup].append(index)
        self._begin()

    def quiesce(self) -> None:
        """Stop the plan, so that state can be read and written. The next step starts the plan from its beginning."""
        self._is_running = False
        self._executor.stop()
        self.store.states.unload()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which no operation runs, so that state can be read and written where it is.

        The plan goes on afterwards. Before the step, it has updated nothing yet, but for speculative updates, which are
        done again."""
        with self._executor.paused():
            self.store.invalidate_speculations()
            yield

    def report_progress(self, ready_share: float) -> None:
        """Report the share of the gradients that the backward has computed."""
        if self._clock.backward_mark is None:
            self._clock.backward_mark = self.device.record("job")
        if self._is_running:
            self._executor.advance_to(min(BACKWARD + ready_share, _BACKWARD_END))

    @property
    def needs_assumption(self) -> bool:
        """Whether speculative updates wait for `assume`."""
        return self._is_running and self._speculates and not self.store.inputs.assumed

    def assume(self, scalars: Sequence[Scalars | None]) -> None:
        """Let speculative updates begin, from the factors by parameter that the next step has if it is neither clipped
        nor skipped."""
        self.store.inputs.assumed = list(scalars)
        self._executor.mark_available(_ASSUMED_SCALARS)

    def offload_gradient(self, param: int, gradient: torch.Tensor) -> None:
        """Offload a gradient (flat) that the calling thread has issued, from now on.

        Only for plans whose workload does not hold gradients until the step."""
        inputs = self.store.inputs
        inputs.gradients[param] = gradient
        mark = self.device.record("job")
        self._offloaded_params.add(param)
        for subgroup in self.store.subgroups_of(param):
            self._gradient_marks[subgroup].append(mark)
            self._missing[subgroup] -= 1
            if not self._missing[subgroup]:
                self._executor.mark_available(subgroup, self._gradient_marks[subgroup])

    def recall_gradients(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Stop the plan and return the offloaded gradients by parameter, flat and on the device, as if they were not
        offloaded."""
        self.quiesce()
        gradients = {param: self.store.gradient(param, params[param]) for param in sorted(self._offloaded_params)}
        self._offloaded_params.clear()
        return {param: gradient for param, gradient in gradients.items() if gradient is not None}

    def discard(self) -> None:
        """Drop the gradients of this iteration, which has no step."""
        self.quiesce()
        self._begin()

    def submit_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Submit the gradients (flat) that were not offloaded, after the backward, and start to copy them."""
        if not self._is_running:
            self._begin()
        mark = self._clock.step_mark = self.device.record("job")
        inputs = self.store.inputs
        for param, gradient in gradients.items():
            inputs.gradients[param] = gradient
        if inputs.assumed:
            for param in set(range(self._params)) - self._offloaded_params - gradients.keys():
                inputs.assumed[param] = None
        for subgroup in range(len(self.store.subgroups)):
            self._executor.mark_available(subgroup, [mark])
        self._executor.advance_to(UPDATE)

    def step(self, values: Sequence[torch.Tensor], scalars: Sequence[Scalars | None]) -> Schedule | None:
        """Update all parameters, after `submit_gradients`.

        With late operations it returns before they have ended: `finish_step` must follow before anything else but
        `wait_for_params`.

        Args:
            values: The parameters, flat.
            scalars: Factors by parameter; None for a parameter that this step does not update.

        Returns:
            The measured schedule; None before `finish_step`.

        Raises:
            OperationFailed: If an operation of the plan failed and the step was completed on the CPU.
            EngineError: If the step could not be completed: the state is lost.
        """
        assert self._plan is not None
        assert self._workload is not None
        assert self._clock.step_mark is not None
        self._clock.scalars_s = time.perf_counter()
        invalid = self.store.use_scalars(values, scalars)
        self._executor.repeat(
            [index for index, op in enumerate(self._plan.ops) if op.speculative and op.subgroup in invalid]
        )
        for number in (_SCALARS, _ASSUMED_SCALARS):
            self._executor.mark_available(number, [self._clock.step_mark])
        self._executor.advance_to(STEP)
        self._row_numbers = reserve_rows(self._plan)
        if not self._plan.has_late_operations:
            return self.finish_step()
        if self._executor.wait(lambda run: not run.remaining_on_time):
            self._clock.returned_s = time.perf_counter()
            return None
        return self.finish_step()

    def wait_for_params(self, params: Iterable[int]) -> bool:
        """Wait until late operations have written parameters, by their indices, and return whether they have.

        If not, an operation has failed, and `finish_step` raises.
        """
        writes = [
            index
            for param in params
            for subgroup in self.store.subgroups_of(param)
            for index in self._late_writes[subgroup]
        ]
        with self._clock.waiting():
            return self._executor.wait(lambda run: all(run.done[index] for index in writes))

    def finish_step(self) -> Schedule:
        """Wait until the last step has ended, with its late operations, and begin the next iteration.

        Returns:
            The measured schedule.

        Raises:
            OperationFailed, EngineError: As `step`.
        """
        assert self._plan is not None
        assert self._workload is not None
        try:
            run = self._executor.finish()
        except OperationFailed as failure:
            self._is_running = False
            self.store.complete(failure.run.plan, failure.run.done)
            raise
        finally:
            self._offloaded_params.clear()
            returned_s, self._clock.returned_s = self._clock.returned_s, None
        record_operations(run, self._row_numbers)
        schedule = self._clock.end_step(run, self._workload, returned_s)
        self.last_schedule = replace(schedule, measured=self._measured_bytes())
        self._begin(returned_s)
        return self.last_schedule

    def close(self) -> None:
        """End the threads and release all memory."""
        self._executor.close()
        self.store.inputs = StepInputs([])
        self.store.release()

    def _measured_bytes(self) -> MeasuredBytes:
        (read, written), (read_before, written_before) = self.store.states.storage_bytes, self._storage_before
        return MeasuredBytes(
            self.device.used_bytes, self.store.host_bytes, read - read_before, written - written_before
        )

    def _begin(self, begin_s: float | None = None) -> None:
        """Begin an iteration. begin_s: when it began, on the clock of time.perf_counter; None: now."""
        assert self._plan is not None
        assert self._workload is not None
        if not self._is_running:
            free = self._workload.min_free_bytes
            self.store.apply_placement(self._plan, self._block_sizes, math.inf if free is None else free)
        streamed = not self._workload.gradients_held_until_step
        # New inputs, so that no reference keeps gradients alive that the job drops.
        self.store.inputs = StepInputs([], [None] * self._params, [None] * self._params, streamed=streamed)
        self._offloaded_params.clear()
        self._missing = [len({segment.param for segment in of.segments}) for of in self.store.subgroups]
        self._gradient_marks = [[] for _ in self.store.subgroups]
        self._clock.begin_iteration()
        self.device.begin_iteration()
        inputs = {index: op.subgroup for index, op in enumerate(self._plan.ops) if op.kind == "gradient down"}
        # Operations that use the scalars of the step wait for them, at whatever point they may begin.
        speculated = self._plan.speculated
        for index, op in enumerate(self._plan.ops):
            if op.kind in _STEP_KINDS or (op.kind == "write" and op.subgroup in speculated):
                inputs[index] = _ASSUMED_SCALARS if op.speculative else _SCALARS
        self._storage_before = self.store.states.storage_bytes
        self._executor.begin(self._plan, inputs, begin_s)
        self._executor.advance_to(0.0)
        self._is_running = True
