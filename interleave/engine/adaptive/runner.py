"""Runs an engine by the plans of a planner, within the available device memory."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from ebbtide.interleave.engine.adaptive.planner import Planner, max_budget, min_budget
from ebbtide.interleave.engine.adaptive.probe import probe
from ebbtide.interleave.engine.adaptive.rates import planning_rates
from ebbtide.interleave.engine.commits import check_digest, with_digest
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import open_device
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.forks import Rest, follow_forks
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.options import Budget, OptimizerOptions
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import Scalars
from ebbtide.interleave.engine.runtime.arena import gradient_elements
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import (
    OperationFailed,
    deferred_interrupts,
)
from ebbtide.interleave.engine.runtime.layout import (
    Subgroup,
    most_frequent,
    state_elements,
)
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.engine.runtime.update import UpdatePhase
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.policies import Policy
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

log = logging.getLogger("ebbtide")

# After the device ran out of memory, the next plan may use this share of what the last
# one needed.
_BACK_OFF = 0.8
# Engines of a process that this one was forked from: releasing them would call CUDA, or
# remove files.
_left_behind: list[tuple[Engine | None, Device | None]] = []
_CLOSED = "this optimizer is closed, or its state is lost: create a new one"


class AdaptiveRunner:
    """Owns an engine, and replaces its plan when a better one is due or the device runs
    out of memory."""

    def __init__(self, options: OptimizerOptions) -> None:
        self.backing = options.open_backing()
        self._use_options(options)
        self.kernel = CpuKernel(options.threads)
        self._device: Device | None = None
        # To call when the late operations of the last step have ended.
        self._on_finished: Callable[[], None] | None = None
        # Limit of device memory, after it ran out once, in bytes.
        self._memory_limit: float | None = None
        self._state_share = 1.0
        self._engine: Engine | None = None
        self._planner: Planner | None = None
        self._next_plan: Plan | None = None
        self._closers = [self.kernel.close]
        self._close = weakref.finalize(self, _close_deleted, self._closers)
        # Whether steps communicate with other ranks.
        self.uses_ranks = False
        # Why it cannot step, once it has no engine any more.
        self._end_reason = _CLOSED
        self._paused_engine: Engine | None = None
        follow_forks(self, Rest.OPERATIONS)
        if options.device is not None:
            # The caller closes a device that it passes.
            self._use_device(options.device)

    @property
    def device(self) -> Device:
        assert self._device is not None
        return self._device

    def open_device(self, device: torch.device) -> None:
        """Use a device from the next `rebuild` on; it is closed together with this
        object, or by the next call."""
        self.check_alive()
        opened = open_device(device)
        self._close_engine()
        if self._device is not None:
            self._closers.remove(self._device.close)
            self._device.close()
        self._closers.append(opened.close)
        self._use_device(opened)

    def check_alive(self) -> None:
        """Raise EngineError after `close`.

        Raise it also in a forked child that cannot have the state.
        """
        if not self._close.alive:
            raise EngineError(self._end_reason)

    def check_process(self) -> None:
        """Raise EngineError in a forked child that cannot have the state."""
        if self._end_reason != _CLOSED:
            raise EngineError(self._end_reason)

    def before_fork(self) -> None:
        engine = self._engine
        if engine is not None and engine.device.survives_forks:
            self._paused_engine = engine
            engine.before_fork()

    def after_fork(self, in_child: bool) -> None:
        engine, self._paused_engine = self._paused_engine, None
        if engine is not None:
            engine.after_fork(in_child)
        if in_child and self.backing.is_used:
            self.leave_behind("its storage belongs to the process that was forked")
        elif in_child and self.uses_ranks:
            self.leave_behind("process groups of torch.distributed do not work in one")
        elif in_child and self._device is not None and not self._device.survives_forks:
            self.leave_behind("CUDA does not work in a forked process")

    def leave_behind(self, reason: str) -> None:
        """End in a forked child that cannot have the state. What belongs to the other
        process stays as it is."""
        self._end_reason = (
            f"this optimizer cannot be used in a forked process, since {reason}: "
            "create one here, or use it there"
        )
        self._close.detach()
        if self._engine is not None:
            self._engine.update.phase = UpdatePhase.ENDED
        _left_behind.append((self._engine, self._device))
        self._engine = None

    def _use_options(self, options: OptimizerOptions) -> None:
        self.options = options
        self._is_adaptive = options.policy.is_adaptive
        self._needs_rates = self.backing.is_used or options.policy.depends_on_rates

    def _use_device(self, device: Device) -> None:
        self._device = device
        if device.numa_node is not None:
            self.kernel.bind(device.numa_node)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._closers.remove(self._engine.close)
            self._engine.close()
            self._engine = None

    def check(self, subgroups: Sequence[Subgroup]) -> None:
        """Raise EngineError, PolicyError or MachineError if no plan is possible for the
        subgroups; no device is needed."""
        options = self.options
        if options.machine is not None or not self._needs_rates:
            machine = options.machine or Machine(name="unknown")
            self._new_planner(machine, subgroups).plan(options.memory_budget)

    def _new_planner(self, machine: Machine, subgroups: Sequence[Subgroup]) -> Planner:
        options = self.options
        return Planner(
            options.policy, machine, subgroups, options.gradients, options.supported
        )

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineError after `close`."""
        if self._engine is None:
            raise EngineError(self._end_reason)
        return self._engine

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
        assert self._planner is not None
        return self._planner

    @property
    def plan(self) -> Plan:
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
        """Replace the engine by one for other subgroups.

        The caller then writes its state and calls `set_plan`. `commit`: the commit
        whose state the engine has. Raises EngineError if a file cannot be used; raises
        as `check`, with nothing changed.
        """
        self.check_alive()
        if commit is not None:
            check_digest(commit)
            self.backing.check(subgroups, commit)
        self._state_share = min(map(_state_share, subgroups), default=1.0)
        planner = self._new_planner(self._rates(subgroups), subgroups)
        plan = planner.plan(self._current_budget())
        for rule in {subgroup.rule for subgroup in subgroups}:
            dtypes = {(of.grad_dtype, of.dtype) for of in subgroups if of.rule is rule}
            self.kernel.warm_up(
                dtypes, self.options.supported.backward and self._needs_rates, rule
            )
            self.device.warm_up(dtypes, rule)
        # First, since the new one may use its files.
        self._close_engine()
        backed = self.backing.open(subgroups, self.device, commit)
        engine = Engine(
            Store(subgroups, self.device, self.kernel, host_buffers, backed), params
        )
        # States that the plan has there are then written to it.
        backed.prepare(plan)
        self._closers.insert(0, engine.close)
        self._engine, self._planner, self._next_plan = engine, planner, plan
        return engine

    def _rates(self, subgroups: Sequence[Subgroup]) -> Machine:
        """Return the rates to plan with: the rates corrected by the steps so far, the
        caller's, or measured ones."""
        if self._planner is not None:
            return self._planner.machine
        return self._first_rates(subgroups)

    def _first_rates(self, subgroups: Sequence[Subgroup]) -> Machine:
        """Return the caller's rates, or measured ones."""
        options = self.options
        machine = options.machine or Machine(name="unknown")
        if options.machine is None and self._needs_rates:
            budget = (
                options.memory_budget
                if options.memory_budget is not None
                else self.device.free_bytes()
            )
            params = sum(subgroup.params for subgroup in subgroups)
            speculates = options.supported.backward
            machine = probe(
                self.device,
                self.kernel,
                params,
                min_budget(budget),
                speculates,
                self.backing.host_bytes,
                most_frequent(subgroups, attrgetter("rule"), ADAMW),
            )
        return self.backing.added_to(machine)

    def set_plan(self) -> None:
        """Start the current plan from its beginning.

        After `rebuild`, it is the plan for the new engine.
        """
        self._apply_plan(self._next_plan or self.plan)

    def use_policy(self, policy: Policy, budget: Budget | None) -> None:
        """Replace the plan by one of another policy, with another budget.

        Raises as `check`; the plan before stays.
        """
        options = self.options
        subgroups, machine = self.engine.store.subgroups, self.planner.machine
        self._use_options(
            replace(
                options,
                policy=policy,
                memory_budget=budget,
                beside_step=options.offered,
            )
        )
        try:
            if self._needs_rates and not any(planning_rates(machine).values()):
                machine = self._first_rates(subgroups)
            planner = self._new_planner(machine, subgroups)
            planner.continue_from(self.planner)
            plan = planner.plan(self._current_budget())
        except BaseException:
            self._use_options(options)
            raise
        self._planner = planner
        self._apply_plan(plan)

    def step(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Scalars | None],
        on_done: Callable[[], None],
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Run `Engine.step`, and make a new plan if one is due. If the plan has late
        operations, `finish_step` must follow before anything but `wait_for_params`. All
        three raise EngineError if the state is lost, or an operation failed. `on_done`
        is called when the step is done, `on_finished` when its late operations have
        ended, too."""
        self._on_finished = on_finished
        if self.options.memory_budget is None:
            # Again after the step: jobs may return memory to the device before it, or
            # use more memory then.
            self.device.sample_memory()
        self._run_to_end(lambda: self.engine.step(values, scalars), on_done)

    def wait_for_params(self, params: Iterable[int]) -> None:
        """Wait until late operations of the last step have written parameters.

        The parameters are given by their indices.
        """
        if self.is_late and not self.engine.wait_for_params(params):
            self.finish_step()

    def finish_step(self) -> None:
        """Wait until the late operations of the last step have ended.

        Make a new plan if one is due.
        """
        if self.is_late:
            self._run_to_end(self.engine.finish_step)

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    @deferred_interrupts()
    def _run_to_end(
        self, run: Callable[[], Any], on_done: Callable[[], None] | None = None
    ) -> None:
        """Run the engine's step or its rest, and what follows once its operations end.

        Interrupts wait.
        """
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
                f"an update failed midway ({error}) and the optimizer's state is lost: "
                "resume from a checkpoint"
            ) from error
        if on_done is not None:
            on_done()
        if self.engine.is_late:
            return
        on_finished, self._on_finished = self._on_finished, None
        if on_finished is not None:
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

    def commit(self, **details: Any) -> dict[str, Any]:
        """Make the state in storage the one to resume from.

        Return what `rebuild` takes for that, with details of the caller, after the plan
        has stopped. Raises EngineError if there is no storage, or it is full; the
        commit before stays.
        """
        states = self.engine.store.states
        return with_digest({**states.backed.commit(states.read), **details})

    def close(self) -> None:
        """End the threads and release all memory. Deleting this object does the
        same."""
        if self._close.detach() is not None:
            _call_all(self._closers)
        self._engine = None

    def _handle_failure(self, failure: OperationFailed) -> None:
        """Continue with less device memory after a step, or raise for other causes.

        The step was completed on the CPU.
        """
        cause = failure.__cause__
        if isinstance(cause, DeviceMemoryError):
            try:
                self._reduce_memory(cause)
                self._replan()
            except EngineError as error:
                raise EngineError(
                    f"{error} (this step was completed on the CPU)"
                ) from cause
            return
        self._replan()
        raise EngineError(
            f"an operation of the plan failed: {cause}; the step was completed on the "
            "CPU"
        ) from cause

    def _reduce_memory(self, error: DeviceMemoryError) -> None:
        """Lower the limit of device memory. Raises the error if the plan used none."""
        needed_bytes = self.planner.needed_bytes
        if not needed_bytes:
            raise error
        limit_bytes = self._memory_limit = _BACK_OFF * needed_bytes
        log.warning(
            "ebbtide: %s; from now on at most %s of it are used",
            error,
            bytes_text(limit_bytes),
        )

    def _replace_plan(self, budget: Budget | None) -> None:
        """Make a new plan.

        Go on with the current one if it fits and the new one would not.
        """
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
        """Use a plan from now on, or one that needs less device memory if the device
        has too little for it."""
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
            log.info(
                "ebbtide: policy %s: %s",
                self.options.policy,
                plan.remark or plan.counts(),
            )

    def _current_budget(self) -> Budget | None:
        budget = (
            self.options.memory_budget
            if self.options.memory_budget is not None
            else self._free_bytes()
        )
        if isinstance(budget, Mapping):
            return {phase: self._limited(size) for phase, size in budget.items()}
        return self._memory_limit if budget is None else self._limited(budget)

    def _free_bytes(self) -> float | None:
        """Return the free device memory. For `adaptive` it is 0 before the first step
        has shown what the job uses. All plans of other policies need the same, which
        the current one has already."""
        free_bytes = self.device.free_bytes()
        if (
            free_bytes is not None
            and self._planner is not None
            and not self._is_adaptive
        ):
            return max(free_bytes, self._planner.needed_bytes)
        has_stepped = (
            self._engine is not None and self._engine.last_schedule is not None
        )
        return (
            free_bytes
            if has_stepped or free_bytes is None or not self._is_adaptive
            else 0.0
        )

    def _limited(self, size: float) -> float:
        size *= self._state_share
        return size if self._memory_limit is None else min(size, self._memory_limit)


def _state_share(subgroup: Subgroup) -> float:
    """Return the share of the memory that is left for state.

    Some is taken if a gradient cannot use the memory of its parameter. Plans count such
    gradients where updates read the parameters.
    """
    if subgroup.rule.reads_params:
        return 1.0
    return state_elements(subgroup) / (
        state_elements(subgroup) + gradient_elements(subgroup)
    )


# How long a thread of the job waits for the end of an engine that it has deleted.
_DELETION_WAIT_S = 10.0
_OWN_THREADS = "ebbtide-"


def _close_deleted(closers: list[Callable[[], None]]) -> None:
    """Close an engine that is deleted, on another thread.

    The garbage collector may call this on any thread, with locks that the threads of
    the engine need before they end.
    """
    if not threading.main_thread().is_alive():
        # The process ends, and has no new threads.
        _call_all(closers)
        return
    closing = threading.Thread(target=_call_all, args=(closers,), name="ebbtide-close")
    closing.start()
    is_own = threading.current_thread().name.startswith(_OWN_THREADS)
    closing.join(0 if is_own else _DELETION_WAIT_S)


def _call_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        close()
