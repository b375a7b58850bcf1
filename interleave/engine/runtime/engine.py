"""The engine: state, executor and plan together, for one step after the other."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.engine.rules.rule import Scalars
from ebbtide.interleave.engine.runtime.arena import block_sizes, worst_case
from ebbtide.interleave.engine.runtime.executor import Executor, OperationFailed
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.engine.runtime.update import Update, UpdatePhase
from ebbtide.interleave.model.kinds import find_kind
from ebbtide.interleave.model.operations import STORAGE_RESOURCES, split_lane
from ebbtide.interleave.model.plan import BACKWARD, STEP, UPDATE, Plan
from ebbtide.interleave.model.schedule import MeasuredBytes, Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.profiler.agent import start
from ebbtide.profiler.agent.spool import HOST

# The latest point that the gradients can report: the backward is over only when the job
# calls step.
_BACKWARD_END = UPDATE - 1e-9
# Inputs beside gradients (by subgroup): the scalars of the step, and those that
# speculative updates assume.
_SCALARS, _ASSUMED_SCALARS = -1, -2


class Engine:
    """Runs a plan at every step, on parameters that are divided into subgroups.

    `params` is the number of parameter tensors. The training thread calls the engine;
    autograd's thread calls `report_progress` and `offload_gradient`.
    """

    _workload: Workload

    def __init__(self, store: Store, params: int) -> None:
        self.store = store
        self.device = store.device
        # Of the last step; None before the first.
        self.last_schedule: Schedule | None = None
        self._params = params
        self._executor = Executor(store.perform, store.device, store.fits, store.end)
        # The plan of the next step.
        self.plan: Plan | None = None
        store.update.phase = UpdatePhase.ENDED
        self._speculates = False
        self._block_sizes: list[int] = []
        self._clock = _StepClock()
        # Of the last step, for the trace that is recorded.
        self._row_numbers: list[int] = []
        # Bytes read from and written to storage before this iteration.
        self._storage_before = (0, 0)
        # Late operations that write the parameters of each subgroup.
        self._late_writes: list[list[int]] = []

    @property
    def update(self) -> Update:
        """The update whose gradients the job computes, or whose late operations run."""
        return self.store.update

    @property
    def is_running(self) -> bool:
        """Whether the plan runs in this iteration."""
        return self.update.is_running

    @property
    def is_late(self) -> bool:
        """Whether the last step has returned while late operations are not known to
        have ended: see `finish_step`."""
        return self.update.phase is UpdatePhase.LATE

    def set_plan(self, plan: Plan, workload: Workload) -> None:
        """Use a plan from now on, and start its operations before the next step."""
        self.quiesce()
        self.plan, self._workload = plan, workload
        self._block_sizes = block_sizes(
            worst_case(plan, workload), self.store.subgroups
        )
        self._speculates = bool(plan.speculated)
        self._late_writes = [[] for _ in self.store.subgroups]
        for index, op in enumerate(plan.ops):
            if op.is_late and find_kind(op.kind).writes_parameters:
                self._late_writes[op.subgroup].append(index)
        self._start()

    def quiesce(self) -> None:
        """Stop the plan, so that state can be read and written. The next step starts
        the plan from its beginning."""
        self.update.phase = UpdatePhase.ENDED
        self._executor.stop()
        self.store.states.unload()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which no operation runs.

        State can then be read and written where it is. The plan goes on afterwards;
        before the step only speculative updates are done again.
        """
        with self._executor.paused():
            self.store.speculative.invalidate(range(len(self.store.subgroups)))
            yield

    def before_fork(self) -> None:
        """End the operations in flight, and start no other."""
        self._executor.before_fork()

    def after_fork(self, in_child: bool) -> None:
        """Go on with the plan; in the child at the next call."""
        self._executor.after_fork(in_child)

    def report_progress(self, ready_share: float) -> None:
        """Report the share of the gradients that the backward has computed."""
        update = self.update
        if update.backward_mark is None:
            update.backward_mark = self.device.record("job")
        if self.is_running:
            self._executor.advance_to(min(BACKWARD + ready_share, _BACKWARD_END))

    @property
    def needs_assumption(self) -> bool:
        """Whether speculative updates wait for `assume`."""
        return self.is_running and self._speculates and not self.update.assumed

    def assume(self, scalars: Sequence[Scalars | None]) -> None:
        """Let speculative updates begin, with the factors of an expected step.

        The factors are by parameter, without clipping or skipping.
        """
        self.update.assumed = list(scalars)
        self._executor.mark_available(_ASSUMED_SCALARS)

    def offload_gradient(self, param: int, gradient: torch.Tensor) -> None:
        """Offload a gradient (flat) that the calling thread has issued, from now on.

        Only for plans whose workload does not hold gradients until the step."""
        update, mark = self.update, self.device.record("job")
        for subgroup in update.offload(
            param, gradient, mark, self.store.subgroups_of(param)
        ):
            self._executor.mark_available(subgroup, update.marks[subgroup])

    @property
    def copies_early(self) -> bool:
        """Whether gradients that stay with the job are copied before the step."""
        return self.is_running and self._workload.copies_gradients_early

    def copy_gradients(
        self, subgroup: int, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        """Copy the gradients (flat) of a subgroup to the host, from now on.

        The job may change them after that: `submit_gradients` has the last values.
        """
        mark = self.device.record("job")
        for param, gradient in gradients.items():
            self.update.gradients[param] = gradient
        self._executor.mark_available(subgroup, [mark])

    def recall_gradients(
        self, params: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Stop the plan and return the offloaded gradients by parameter, flat, on the
        device again."""
        self.quiesce()
        offloaded = self.update.offloaded
        gradients = {
            param: self.store.gradient(param, params[param])
            for param in sorted(offloaded)
        }
        offloaded.clear()
        return {
            param: gradient
            for param, gradient in gradients.items()
            if gradient is not None
        }

    def discard(self) -> None:
        """Drop the gradients of this iteration, which has no step."""
        self.quiesce()
        self._start()

    def submit_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Submit the gradients (flat) that were not offloaded, after the backward, and
        start to copy them."""
        if not self.is_running:
            self._start()
        update, mark = self.update, self.device.record("job")
        if self.copies_early:
            with self._executor.paused():
                update.submit(mark)
                self._renew_copies(self.store.use_gradients(gradients), mark)
        else:
            update.submit(mark)
            for param, gradient in gradients.items():
                update.gradients[param] = gradient
        if update.assumed:
            for param in set(range(self._params)) - update.offloaded - gradients.keys():
                update.assumed[param] = None
        for subgroup in range(len(self.store.subgroups)):
            self._executor.mark_available(subgroup, [mark])
        self._executor.advance_to(UPDATE)

    def _renew_copies(self, stale: set[int], mark: Mark) -> None:
        """Copy stale gradients again, and others not before a mark."""
        assert self.plan is not None
        copies = {
            index: op.subgroup
            for index, op in enumerate(self.plan.ops)
            if op.kind == "gradient down"
        }
        again = {index for index, subgroup in copies.items() if subgroup in stale}
        self._executor.renew(copies, again, mark)

    def step(
        self, values: Sequence[torch.Tensor], scalars: Sequence[Scalars | None]
    ) -> Schedule | None:
        """Update parameters (flat) by factors, after `submit_gradients`.

        A factor is None for a parameter that stays as it is. With late operations
        `finish_step` must follow before anything but `wait_for_params`. Both raise
        OperationFailed if the step was completed on the CPU, else EngineError: the
        state is lost.
        """
        assert self.plan is not None
        update = self.update
        assert update.step_mark is not None
        update.decide(values, scalars, time.perf_counter())
        invalid = self.store.use_scalars()
        self._executor.repeat(
            [
                index
                for index, op in enumerate(self.plan.ops)
                if op.is_speculative and op.subgroup in invalid
            ]
        )
        for number in (_SCALARS, _ASSUMED_SCALARS):
            self._executor.mark_available(number, [update.step_mark])
        self._executor.advance_to(STEP)
        self._row_numbers = reserve_rows(self.plan)
        if not self.plan.has_late_operations:
            return self.finish_step()
        if self._executor.wait(lambda run: not run.remaining_on_time):
            update.return_late(time.perf_counter())
            return None
        return self.finish_step()

    def wait_for_params(self, params: Iterable[int]) -> bool:
        """Wait until late operations have written parameters, by index.

        False: one has failed, and `finish_step` raises.
        """
        writes = [
            index
            for param in params
            for subgroup in self.store.subgroups_of(param)
            for index in self._late_writes[subgroup]
        ]
        with self._clock.waiting():
            return self._executor.wait(
                lambda run: all(run.done[index] for index in writes)
            )

    def finish_step(self) -> Schedule:
        """Wait until the last step has ended, and begin the next iteration.

        The end includes late operations.
        """
        update = self.update
        try:
            run = self._executor.finish()
        except OperationFailed:
            update.phase = UpdatePhase.LOST
            self.store.complete()
            update.phase = UpdatePhase.RECOVERED
            raise
        except BaseException:
            update.phase = UpdatePhase.LOST
            raise
        finally:
            update.offloaded.clear()
        update.phase = UpdatePhase.ENDED
        record_operations(run, self._row_numbers)
        schedule = self._clock.end_step(update, run, self._workload)
        (read, written), (read_before, written_before) = (
            self.store.states.storage_bytes,
            self._storage_before,
        )
        measured = MeasuredBytes(
            self.device.used_bytes,
            self.store.host_bytes,
            read - read_before,
            written - written_before,
        )
        self.last_schedule = replace(schedule, measured=measured)
        self._begin(update.returned_s)
        return self.last_schedule

    def close(self) -> None:
        """End the threads and release all memory."""
        self._executor.close()
        self.store.update = Update(phase=UpdatePhase.ENDED)
        self.store.release()

    def _start(self) -> None:
        """Move state to where the plan has it at first, and begin an iteration."""
        assert self.plan is not None
        free = self._workload.min_free_bytes
        self.store.apply_placement(
            self.plan, self._block_sizes, math.inf if free is None else free
        )
        self._begin()

    def _begin(self, begin_s: float | None = None) -> None:
        """Begin an iteration.

        `begin_s` says when it began, on the clock of time.perf_counter; None: now.
        """
        assert self.plan is not None
        streamed = not self._workload.gradients_held_until_step
        # A new one, so that no reference keeps gradients alive that the job drops.
        number = self.update.number + 1
        self.store.update = Update.of_params(
            self._params, self.store.subgroups, number, streamed
        )
        self.device.begin_iteration()
        inputs = {
            index: op.subgroup
            for index, op in enumerate(self.plan.ops)
            if op.kind == "gradient down"
        }
        # Operations that use the scalars of the step wait for them, at whatever point
        # they may begin.
        speculated = self.plan.speculated
        for index, op in enumerate(self.plan.ops):
            if find_kind(op.kind).needs_scalars or (
                op.kind == "write" and op.subgroup in speculated
            ):
                inputs[index] = _ASSUMED_SCALARS if op.is_speculative else _SCALARS
        self._storage_before = self.store.states.storage_bytes
        self._executor.begin(self.plan, inputs, begin_s)
        self._executor.advance_to(0.0)


class _StepClock:
    """Measures the phases of steps. Times are on the clock of time.perf_counter, s."""

    def __init__(self) -> None:
        # How long the forward has waited for late operations since the last step.
        self._waited_s = 0.0
        # The same of the forward of this iteration, which was over when its plan began.
        self._iteration_waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting of the forward."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - begin_s

    def end_step(self, update: Update, run: PlanRun, workload: Workload) -> Schedule:
        """Return the measured schedule of an ended update, and measured phases.

        The update has ended with its late operations.
        """
        step_mark = update.step_mark
        assert step_mark is not None
        end_s = (
            time.perf_counter() if update.returned_s is None else update.returned_s
        ) - run.begin_s
        step_s = step_mark.time_s - run.begin_s
        forward_s = max(
            0.0, min((update.backward_mark or step_mark).time_s - run.begin_s, step_s)
        )
        job = replace(
            workload,
            other_s=0.0,
            forward_s=max(0.0, forward_s - self._iteration_waited_s),
            backward_s=max(0.0, step_s - forward_s),
        )
        # What was waited since is of the iteration that has begun.
        self._iteration_waited_s, self._waited_s = self._waited_s, 0.0
        return Schedule(
            plan=_as_performed(run, update.decided_s),
            workload=job,
            starts=run.starts,
            ends=run.ends,
            other_s=0.0,
            forward_s=forward_s,
            backward_s=job.backward_s,
            update_s=end_s - step_s,
        )


def _as_performed(run: PlanRun, scalars_s: float) -> Plan:
    """Return the plan of a run as it was performed.

    Updates are speculative only if they began before the scalars were known.
    """
    if not run.plan.speculated:
        return run.plan
    known_s = scalars_s - run.begin_s
    ops = [
        op if start < known_s or not op.is_speculative else op._replace(tag=None)
        for op, start in zip(run.plan.ops, run.starts, strict=True)
    ]
    return replace(run.plan, ops=tuple(ops))


def reserve_rows(plan: Plan) -> list[int]:
    """Return numbers for the rows of all operations of a step; none where nothing is
    recorded.

    There are as many again for repeated ones, which belong to this iteration even if
    they are added later."""
    recorder = start.current_recorder()
    if recorder is None or not recorder.recording:
        return []
    return [recorder.next_sequence() for _ in range(2 * len(plan.ops))]


def record_operations(run: PlanRun, numbers: Sequence[int]) -> None:
    """Add a row to the table `ops` of the trace for each operation.

    Add one also for each speculative update that was not used. The numbers are those
    that `reserve_rows` has returned before the step.
    """
    recorder = start.current_recorder()
    if recorder is None:
        return
    times = [
        *zip(range(len(run.plan.ops)), run.starts, run.ends, strict=True),
        *run.discarded,
    ]
    for number, (index, start_s, end_s) in zip(numbers, times, strict=False):
        op = run.plan.ops[index]
        # time.perf_counter is the recorder's clock, CLOCK_MONOTONIC.
        times_ns = (round((run.begin_s + time_s) * 1e9) for time_s in (start_s, end_s))
        subgroup = op.subgroup if op.subgroup >= 0 else None
        resource, path = split_lane(op.resource)
        nbytes, device = (
            round(op.nbytes) or None,
            path if resource in STORAGE_RESOURCES else HOST,
        )
        recorder.put_op(
            number,
            op.kind,
            resource,
            *times_ns,
            subgroup=subgroup,
            nbytes=nbytes,
            device=device,
        )
