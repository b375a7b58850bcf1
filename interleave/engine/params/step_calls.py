"""Calls of an optimizer, one after the other from any thread.

Also what features do at the points of a step.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ebbtide import seams
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forks import Rest, follow_forks, fork_lock
from ebbtide.interleave.engine.rules.rule import Scalars

log = logging.getLogger("ebbtide")

Method = TypeVar("Method", bound=Callable[..., Any])

# How long a fork waits for a call on another thread.
_FORK_WAIT_S = 1.0


class StepHooks:
    """Methods of a feature that each step calls at its points, in this order. All do
    nothing here.

    The seam `step-hooks` has functions that make them: (calls, model of the caller or
    None), None for no hooks.

    Attributes:
        is_pending: Whether `ended` has something to do.
    """

    is_pending = False

    def params_set(
        self, params: Sequence[torch.Tensor], whole: Mapping[int, int]
    ) -> None:
        """Take the parameters, by index, that steps update from now on.

        The parameters in `whole` are updated as a whole.
        """

    def gradient_ready(self, index: int) -> None:
        """Check a gradient that a backward has computed. What this raises, the backward
        raises."""

    def gradients_in(self) -> None:
        """Prepare for a step whose gradients are there, after the last one has ended;
        may raise EngineError."""

    def decided(self, updated: Sequence[int]) -> None:
        """Prepare for the update of these parameters, which is certain now."""

    def returning(self) -> None:
        """Wait before a step returns whose late operations still run.

        Wait for what must be done before that.
        """

    def ended(self) -> None:
        """Take back what was prepared, after the last operation, even a failed one."""

    def closed(self) -> None:
        """Leave everything as it was: there is no step any more."""


class StepCalls:
    """Whole calls of an optimizer, its steps, and the end of late operations.

    Calls hold a lock. The late operations belong to a step.

    Attributes:
        lock: Held by whole calls from any thread; by hooks of modules only while
            something is pending.
        is_active: Whether a step runs, or is not known to have ended. Read without the
            lock, so it is reset at last.
    """

    def __init__(self, runner: AdaptiveRunner) -> None:
        self.lock = fork_lock()
        self.is_active = False
        self.runner = runner
        self._hooks: list[StepHooks] = []
        self._params: Sequence[torch.Tensor] = ()
        self._is_at_rest = False
        # The parameters that the last step has updated, those among them whose values
        # were recorded since, and the function that records them.
        self._updated: set[int] = set()
        self._recorded: set[int] = set()
        self._record: Callable[[Iterable[int]], None] | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether a feature does something at the points of a step."""
        return bool(self._hooks)

    def add_hooks(self, model: torch.nn.Module | None) -> None:
        """Add the hooks of all features. Raises EngineError if one cannot be used with
        the model."""
        for make_hooks in seams.load_all("step-hooks"):
            hooks = make_hooks(self, model)
            if hooks is not None:
                self._hooks.append(hooks)

    def finish_after(self, owner: object) -> None:
        """Call `finish` when an object is deleted, before a fork, and at the end.

        The end is before the process closes engines.
        """
        weakref.finalize(owner, _finish_on_thread, self).atexit = False
        _unfinished.add(self)
        follow_forks(self, Rest.CALLS)

    def before_fork(self) -> None:
        # A step on another thread may never end.
        self._is_at_rest = self.lock.acquire(timeout=_FORK_WAIT_S)
        if self._is_at_rest:
            # The child has a copy of the parameters.
            _finish_or_log(self)

    def after_fork(self, in_child: bool) -> None:
        if self._is_at_rest:
            self.lock.release()
        elif in_child:
            self.runner.leave_behind("another thread was in a call of it")
            self.is_active = False
            self._end_hooks()

    def set_params(
        self, params: Sequence[torch.Tensor], whole: Mapping[int, int]
    ) -> None:
        """Use these parameters from now on, by index, when nothing is pending."""
        self._params = params
        for hooks in self._hooks:
            hooks.params_set(params, whole)

    def check_gradient(self, index: int) -> None:
        """Raise EngineError for a gradient that a hook does not accept."""
        for hooks in self._hooks:
            hooks.gradient_ready(index)

    def begin_step(self) -> None:
        """Prepare for a step once the last has ended. Raises EngineError if a hook does
        not accept a gradient."""
        for hooks in self._hooks:
            hooks.gradients_in()

    def step(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Scalars | None],
        on_done: Callable[[], None],
        record: Callable[[Iterable[int]], None],
    ) -> None:
        """Run `AdaptiveRunner.step`.

        `record`, called when parameters are written, takes their values, by index, as
        the update's values.
        """
        updated = [
            index for index, factors in enumerate(scalars) if factors is not None
        ]
        torch.autograd.graph.increment_version(
            [self._params[index] for index in updated]
        )
        self._updated, self._recorded, self._record = set(updated), set(), record
        self.is_active = True
        try:
            for hooks in self._hooks:
                hooks.decided(updated)
            self.runner.step(values, scalars, on_done, self._record_others)
            if self.runner.is_late:
                for hooks in self._hooks:
                    hooks.returning()
        finally:
            if not self.runner.is_late:
                self._end_hooks()
                self.is_active = False

    def record(self, indices: set[int]) -> None:
        """Record the values of parameters that are written.

        The job may write them while other updates run.
        """
        if self.runner.is_late and self._record is not None:
            self._record(indices)
            self._recorded |= indices

    def finish(self) -> None:
        """Wait until all late operations have ended.

        From now on the job may read and write all parameters.
        """
        if not (self.is_active or any(hooks.is_pending for hooks in self._hooks)):
            return
        with self.lock:
            try:
                self.finish_updates()
            finally:
                self._end_hooks()

    def finish_updates(self) -> None:
        """Wait until all late operations have ended. What hooks have prepared stays
        so."""
        if not self.is_active:
            return
        # The engine's own operations are no part of what torch.func transforms.
        with self.lock, temporarily_clear_interpreter_stack():
            try:
                self.runner.finish_step()
            finally:
                self.is_active = False

    def close(self) -> None:
        """Close all hooks."""
        for hooks in self._hooks:
            hooks.closed()

    def _end_hooks(self) -> None:
        for hooks in self._hooks:
            hooks.ended()

    def _record_others(self) -> None:
        """Record the values of updated parameters that were not recorded, after the
        last update has ended."""
        record, self._record = self._record, None
        if record is not None:
            record(self._updated - self._recorded)


def locked(method: Method) -> Method:
    """Return a method of an optimizer that excludes calls of others by other
    threads."""

    @wraps(method)
    def locked_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Memory that is allocated in inference mode could not be written outside of
        # that mode.
        with self._calls.lock, torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return cast(Method, locked_method)


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive.

    Return None without the object.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound_method = reference()
        return None if bound_method is None else bound_method(*arguments)

    return call


# What the end of the process finishes.
_unfinished: weakref.WeakSet[StepCalls] = weakref.WeakSet()


def _finish_on_thread(calls: StepCalls) -> None:
    """Finish on another thread.

    The garbage collector may call this on any thread, which must not wait.
    """
    if calls.is_active:
        threading.Thread(
            target=_finish_or_log, args=(calls,), name="ebbtide-finish"
        ).start()


def _finish_or_log(calls: StepCalls) -> None:
    try:
        calls.finish()
    except EngineError as error:
        log.error("ebbtide: %s", error)


def _finish_all() -> None:
    for calls in list(_unfinished):
        # A step on another thread may never end.
        if calls.lock.acquire(blocking=False):
            try:
                _finish_or_log(calls)
            finally:
                calls.lock.release()


# `atexit` calls its functions when pools of threads, which update on the CPU, have
# ended. This comes before.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
