"""Splits updates whose optimizer calls a closure.

The closure's forward and backward become phases of their own.
"""

from __future__ import annotations

import _thread
import time
from typing import TYPE_CHECKING, Any, Callable

from .frames import hidden, hide_frame
from .iteration_rule import UPDATE

if TYPE_CHECKING:
    from .recorder import PhaseRecord, Recorder

# A shorter part is only the way into the step (torch's hooks take about 40 us, and
# garbage may be collected), or out of the step. The way in counts by its CPU time,
# since the thread may be stopped there, unless it is so long that it waits.
_SHORT_BEFORE_NS = 500_000
_WAITING_NS = 100_000_000
_SHORT_AFTER_NS = 20_000

_SEVERAL_CALLS_NOTE = (
    "an optimizer calls its closure several times per step (as LBFGS does): such a "
    "step is one update, "
    "with the forwards and backwards of the closure in it"
)


class UpdateParts:
    """Holds back an open update that may call a closure, until the step ends.

    If it does so once, the parts of the step before and after the call are updates, and
    what runs in the closure has phases of its own; if more often, all of it is one
    update. Created after `enter`, and ended by this class's `leave` instead of the
    recorder's.

    `failed`: whether the closure raised, so that the optimizer has not stepped."""

    def __init__(self, recorder: Recorder) -> None:
        self.failed = False
        self._recorder = recorder
        self._thread = _thread.get_ident()
        self._calls = 0
        self._lost = False
        self._cpu_ns = time.thread_time_ns()
        self._keeps_before: bool | None = None
        self._before: PhaseRecord | None = None
        self._deferred_outside: list[PhaseRecord] | None = None
        self._stepped: list[Any] = []
        recorder.parts = self

    def wrap_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], of_torch: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Replace the closure among the arguments of a `step`.

        A step `of_torch` does nothing before it calls it.
        """
        if of_torch and not self._calls:
            self._measure_before()
        if len(args) > 1 and self._is_unwrapped(args[1]):
            return (args[0], _WatchedClosure(self, args[1]), *args[2:]), kwargs
        if self._is_unwrapped(kwargs.get("closure")):
            return args, {**kwargs, "closure": _WatchedClosure(self, kwargs["closure"])}
        return args, kwargs

    def _measure_before(self) -> None:
        """Decide whether the part of the step up to now is a phase."""
        if self._keeps_before is None:
            cpu_ns = time.thread_time_ns() - self._cpu_ns
            waited_ns = time.monotonic_ns() - self._recorder.started_ns
            self._keeps_before = cpu_ns >= _SHORT_BEFORE_NS or waited_ns >= _WAITING_NS

    @staticmethod
    def _is_unwrapped(closure: Any) -> bool:
        return callable(closure) and not isinstance(closure, _WatchedClosure)

    @hide_frame
    def call(self, closure: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the closure of the step."""
        if self._recorder.parts is not self or _thread.get_ident() != self._thread:
            return closure(*args, **kwargs)
        self._calls += 1
        if self._calls > 1:
            self._merge()
            return closure(*args, **kwargs)
        self._suspend()
        try:
            return closure(*args, **kwargs)
        except BaseException:
            self.failed = True
            raise
        finally:
            self._resume()

    def _suspend(self) -> None:
        recorder = self._recorder
        try:
            self._stepped = list(recorder.stepped)
            self._measure_before()
            if recorder.recording:
                self._before = recorder.end_record(time.monotonic_ns())
            self._deferred_outside, recorder.deferred = recorder.deferred, []
        except Exception as error:
            recorder.fail(error)
        finally:
            recorder.parts = None
            recorder.release_phase()

    def _resume(self) -> None:
        recorder = self._recorder
        # Nothing is held back in a child that the closure forked.
        if recorder.deferred is None or not recorder.enter(UPDATE):
            self._lost = True
            return
        recorder.parts = self
        recorder.stepped.extend(self._stepped)

    def _merge(self) -> None:
        """Make the whole step one update, when the closure is called a second time."""
        if self._calls == 2:
            recorder = self._recorder
            try:
                recorder.note_once(_SEVERAL_CALLS_NOTE)
                if self._before is not None:
                    recorder.extend_back(self._before)
                recorder.settle(False, self._deferred_outside)
            except Exception as error:
                recorder.fail(error)

    def finish(self, end_ns: int, counts: bool = True) -> bool:
        """Write what was held back; return whether the last part is a phase. `counts`:
        it is of an iteration."""
        before, recorder = self._before, self._recorder
        if self._calls != 1:
            return True
        keep_before = False
        if before is not None:
            keep_before = counts and bool(self._keeps_before)
            if keep_before and recorder.deferred is not None:
                recorder.deferred.insert(0, before)
            else:
                recorder.release_marks(before)
        recorder.settle(True, self._deferred_outside)
        return not self.failed and (
            end_ns - recorder.started_ns >= _SHORT_AFTER_NS or not keep_before
        )

    def leave(self, optimizer: Any) -> None:
        """Close the update of `optimizer`; it counts if another thread has opened a
        phase meanwhile."""
        recorder = self._recorder
        if not self._lost:
            recorder.leave()
            return
        try:
            if recorder.live:
                self.finish(time.monotonic_ns())
                if optimizer is not None and not self.failed:
                    recorder.count_step([*self._stepped, optimizer])
        except Exception as error:
            recorder.fail(error)


class _WatchedClosure:
    """A closure whose calls are seen; otherwise like the closure itself."""

    def __init__(self, parts: UpdateParts, closure: Callable[..., Any]) -> None:
        self.__wrapped__ = closure
        self._parts = parts

    @hidden
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._parts.call(self.__wrapped__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__wrapped__"], name)
