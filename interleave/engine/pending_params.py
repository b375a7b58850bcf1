"""Parameters that a step may still write after it has returned: waits for them, and finds lost writes of the job."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forward_gates import ForwardGates
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.read_checks import ReadChecks, UnguardedAccess

log = logging.getLogger("ebbtide")


class PendingParams:
    """The parameters that the last step has updated, each until something has waited for it.

    A write of the job to a parameter before that is overwritten by the update, or the master does not follow it. The
    version counters of the parameters show such writes: a step counts one version for each parameter, and operations of
    the engine count none (see `flat_view`). `p.data` and NumPy arrays count none either, so their writes are not found.

    Args:
        runner: The runner of the engine.

    Attributes:
        lock: Held by whole calls of the optimizer, so that one from another thread comes before or after a step. Hooks
            during a forward or a backward only take it while something is pending.
        is_active: Whether a step runs, or is not known to have ended.
        names: The parameters of the guarded model, and their names; a step waits for all others.
    """

    def __init__(self, runner: AdaptiveRunner) -> None:
        self.lock = threading.RLock()
        self.names: Mapping[torch.Tensor, str] = {}
        self._runner = runner
        self._gates: ForwardGates | None = None
        # With checks, no update is late, and parameters are hidden instead.
        self._checks: ReadChecks | None = None
        self._params: Sequence[torch.Tensor] = ()
        # The index of each parameter, which the forward of every module looks up.
        self._index: dict[torch.Tensor, int] = {}
        # Read without the lock, so it is the last to be reset.
        self.is_active = False
        # The version of each parameter when its step began: those that nothing has waited for yet, and the others.
        self._versions: dict[int, int] = {}
        self._released: dict[int, int] = {}
        # Parameters that the job has written after something had waited for them, and before.
        self._written: set[int] = set()
        self._lost: set[int] = set()

    def guard(self, model: torch.nn.Module) -> None:
        """Let the forward, state dicts and copies of a model wait. Raises EngineError if they cannot."""
        weak_self = weakref.ref(self)
        self._gates = ForwardGates(model, lambda params: _wait(weak_self, params), lambda: _finish(weak_self))
        self.names = self._gates.names

    def remove_guards(self) -> None:
        """Let no model wait any more."""
        if self._gates is not None:
            self._gates.remove()

    def finish_after(self, owner: object) -> None:
        """Call `finish` when an object is deleted or the process ends, before the engine is closed."""
        weakref.finalize(owner, _finish_on_thread, self).atexit = False
        _unfinished.add(self)

    def set_params(self, params: Sequence[torch.Tensor]) -> None:
        """Use these parameters from now on, in the order of their indices. Nothing may be pending."""
        self._params = params
        self._index = {param: number for number, param in enumerate(params)}
        self._written.clear()

    def step(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Scalars | None],
        on_done: Callable[[], None],
        on_finished: Callable[[], None],
    ) -> None:
        """Run `AdaptiveRunner.step`; afterwards the updated parameters are pending if it has late operations."""
        updated = [index for index, factors in enumerate(scalars) if factors is not None]
        torch.autograd.graph.increment_version([self._params[index] for index in updated])
        self._versions = {index: self._params[index]._version for index in updated}
        self.is_active = True
        try:
            self._runner.step(values, scalars, on_done, on_finished)
            if self._checks is not None:
                self._runner.finish_step()
                self._checks.hide({index: self._params[index] for index in updated})
            elif self._runner.is_late:
                unguarded = [index for index in updated if self._params[index] not in self.names]
                self._runner.wait_for_params(unguarded)
                self._release(unguarded)
        finally:
            if not self._runner.is_late:
                self._versions.clear()
                self.is_active = self._checks is not None

    def wait_for(self, params: Iterable[torch.Tensor]) -> None:
        """Wait until parameters are written; from now on the job may read and write them.

        Raises:
            EngineError: An operation has failed, or the job wrote to one of the parameters before.
        """
        if not self.is_active:
            return
        indices = [self._index[param] for param in params if param in self._index]
        with self.lock:
            self._runner.wait_for_params(indices)
            self._release(indices)
            self._raise_lost()

    def finish(self) -> None:
        """Wait until all late operations have ended.

        Raises:
            EngineError: As `wait_for`.
        """
        if not self.is_active:
            return
        with self.lock:
            try:
                self._runner.finish_step()
            finally:
                self._release(range(len(self._params)))
                self._written |= {
                    index for index, version in self._released.items() if self._params[index]._version != version
                }
                self._released.clear()
                self.is_active = False
            self._raise_lost()

    @contextmanager
    def check_reads(self) -> Iterator[list[UnguardedAccess]]:
        """Check reads and writes meanwhile, instead of late updates; see `InterleavedAdamW.check_reads`."""
        self.finish()
        self._checks = checks = ReadChecks(self.names, self.lock)
        try:
            with checks.watch():
                yield checks.accesses
        finally:
            try:
                self.finish()
            finally:
                self._checks = None

    @property
    def written(self) -> frozenset[int]:
        """The parameters that the job has written while others were pending, as `take_written` returns them."""
        return frozenset(self._written)

    def take_written(self) -> set[int]:
        """Return the parameters that the job has written while others were pending, and forget them."""
        written, self._written = self._written, set()
        return written

    def _release(self, indices: Iterable[int]) -> None:
        if self._checks is not None:
            self._checks.release(indices)
        for index in indices:
            version = self._versions.pop(index, None)
            if version is not None:
                self._released[index] = version
                if self._params[index]._version != version:
                    self._lost.add(index)

    def _raise_lost(self) -> None:
        """Raise EngineError, once, for the parameters that the job wrote to while they were pending."""
        lost, self._lost = self._lost, set()
        if lost:
            names = [self.names.get(self._params[index], f"number {index}") for index in sorted(lost)]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EngineError(
                f"parameter {names[0]}{others} was written after step() and before its update had ended, so the write "
                "may be lost: call optimizer.synchronize() before you write to parameters"
            )


def _wait(pending_ref: weakref.ref[PendingParams], params: Sequence[torch.Tensor]) -> None:
    pending = pending_ref()
    if pending is not None:
        pending.wait_for(params)


def _finish(pending_ref: weakref.ref[PendingParams]) -> None:
    pending = pending_ref()
    if pending is not None:
        pending.finish()


# What the end of the process finishes.
_unfinished: weakref.WeakSet[PendingParams] = weakref.WeakSet()


def _finish_on_thread(pending: PendingParams) -> None:
    """Finish on another thread: the garbage collector may call this on any one, which must not wait."""
    if pending.is_active:
        threading.Thread(target=_finish_or_log, args=(pending,), name="ebbtide-finish").start()


def _finish_or_log(pending: PendingParams) -> None:
    try:
        pending.finish()
    except EngineError as error:
        log.error("ebbtide: %s", error)


def _finish_all() -> None:
    for pending in list(_unfinished):
        # A step on another thread may never end.
        if pending.lock.acquire(blocking=False):
            try:
                _finish_or_log(pending)
            finally:
                pending.lock.release()


# `atexit` calls its functions when pools of threads, which update on the CPU, have ended. This comes before.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
