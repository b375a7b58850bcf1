"""Records the out-of-memory errors of a job, and what parameters, gradients and
optimizer state hold."""

from __future__ import annotations

import functools
import time
from typing import Any

from .exceptions import ExceptionHooks
from .inventory import list_holders
from .iteration_rule import BACKWARD
from .memory_reader import ALLOCATED, HEAP, RESERVED
from .options import Options
from .recorder import Recorder
from .spool import PHASES

# The first iterations create gradients and optimizer state: the inventory of a later
# one is the typical one.
_SETTLED_ITERATION = 2
_MAX_ERRORS = 3
_MAX_FIRST = 3
_MAX_MESSAGE = 2000
_NOT_OBSERVED_NOTE = (
    "out-of-memory errors are recorded from exceptions alone: the job's CUDA allocator "
    "is not torch's own, and does "
    "not report them"
)


def attach_memory_records(recorder: Recorder, torch: Any, options: Options) -> None:
    """Add inventories of memory and records of out-of-memory errors to `recorder`."""
    if not options.memory:
        return

    def attach() -> None:
        inventories = Inventories(recorder, options)
        recorder.on_iteration.append(inventories.enter_iteration)
        recorder.on_update.append(inventories.enter_update)
        errors = OutOfMemoryWatch(recorder, torch, inventories)
        recorder.on_iteration.append(errors.attach_observer)
        recorder.on_error.append(errors.see)

    attach()
    recorder.on_restart.append(attach)
    recorder.on_close.append(ExceptionHooks(recorder.report_error).remove)


class Inventories:
    """Takes inventories: at the end of the first update, at the start of one that is
    typical, and when asked to."""

    def __init__(self, recorder: Recorder, options: Options) -> None:
        self._recorder = recorder
        self._first = options.first
        self._settled = max(options.first, _SETTLED_ITERATION)
        self._at_first: list[dict[str, Any]] = []
        self._others: list[dict[str, Any]] = []
        self._first_updates = 0

    def enter_iteration(self, iteration: int) -> None:
        """Take an inventory at the end of the first iteration; if another update
        extends it, take it again."""
        if iteration == self._first + 1 and self._first_updates < _MAX_FIRST:
            self._first_updates += 1
            self._at_first = []
            self._take(self._at_first, _in_update(iteration - 1))

    def enter_update(self) -> None:
        """Take an inventory at the start of the first update of the typical
        iteration."""
        recorder = self._recorder
        if recorder.iteration >= self._settled:
            recorder.on_update.remove(self.enter_update)
            if (
                not self._take(self._others, _in_update(recorder.iteration))
                and recorder.threads.several
            ):
                # What was read before is that of one thread, and lacks what the others
                # hold.
                self._at_first, self._others = [], []
                recorder.job_info.set("inventories", [])

    def add_out_of_memory(self, record: dict[str, Any]) -> bool:
        """Take an inventory at an out-of-memory error; return whether tensors could be
        read."""
        moment = {key: record[key] for key in ("t_ns", "iteration", "phase")}
        failed_on = record["device"] if record["phase"] == PHASES[BACKWARD] else None
        return self._take(
            self._others, {**moment, "reason": "out of memory"}, failed_on
        )

    def _take(
        self,
        inventories: list[dict[str, Any]],
        moment: dict[str, Any],
        failed_on: str | None = None,
    ) -> bool:
        holders = self._recorder.read_tensors(
            functools.partial(list_holders, failed_on=failed_on)
        )
        if holders is not None:
            inventories.append({**moment, "holders": holders})
            self._recorder.job_info.set("inventories", self._at_first + self._others)
        return holders is not None


def _in_update(iteration: int) -> dict[str, Any]:
    return {
        "t_ns": time.monotonic_ns(),
        "iteration": iteration,
        "phase": "update",
        "reason": "update",
    }


class OutOfMemoryWatch:
    """Records out-of-memory errors, up to a number: from torch's observer on CUDA, and
    from exceptions."""

    def __init__(
        self, recorder: Recorder, torch: Any, inventories: Inventories
    ) -> None:
        self._recorder = recorder
        self._torch = torch
        self._inventories = inventories
        self._kind: Any = (
            getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError
        )
        self._records: list[dict[str, Any]] = []
        self._attached = False
        # The last record of the observer, whose exception was not seen yet.
        self._unexplained: dict[str, Any] | None = None
        # The last record, where tensors could not be read at its time: in a backward
        # that autograd's threads run.
        self._without_inventory: dict[str, Any] | None = None
        # Of the last exception, which itself would keep tensors alive: an address, and
        # arguments that keep it unique.
        self._last: tuple[int, tuple[Any, ...]] = 0, ()

    def attach_observer(self, iteration: int) -> None:
        """Ask torch's CUDA allocator to report its errors, once the job uses it. It
        cannot be asked to stop."""
        attach = getattr(self._torch._C, "_cuda_attach_out_of_memory_observer", None)
        if (
            not self._attached
            and attach is not None
            and self._torch.cuda.is_initialized()
        ):
            self._attached = True
            try:
                attach(self.observe)
            except RuntimeError:
                # Another allocator than torch's own: cudaMallocAsync, or a pluggable
                # one.
                self._recorder.job_info.note(_NOT_OBSERVED_NOTE)

    def observe(self, device: int, requested: int, total: int, free: int) -> None:
        """Record an allocation that failed. Called by torch inside of it, on any
        thread; never raises."""
        try:
            if not self._recorder.live:
                return
            readings = {
                (pool, number): size
                for pool, number, size in self._recorder.read_memory(device)
            }
            self._unexplained = self._add(
                device=f"cuda:{device}",
                requested_bytes=requested,
                free_bytes=free,
                capacity_bytes=total,
                allocated_bytes=readings.get((ALLOCATED, device)),
                reserved_bytes=readings.get((RESERVED, device)),
            )
        except Exception as error:
            self._recorder.fail(error)

    def see(self, error: BaseException) -> None:
        """Record an exception if it says that memory ran out, and was not recorded
        yet."""
        recorder = self._recorder
        if not isinstance(error, RuntimeError) or not recorder.live:
            return
        text = str(error)
        on_cpu = "DefaultCPUAllocator" in text and "you tried to allocate" in text
        if (
            not on_cpu
            and not isinstance(error, self._kind)
            and "CUDA error: out of memory" not in text
        ):
            return
        if self._last[0] == id(error) and self._last[1] is error.args:
            return
        self._last = id(error), error.args
        text = text[:_MAX_MESSAGE]
        unexplained, self._unexplained = self._unexplained, None
        if unexplained is not None and not on_cpu:
            unexplained["message"] = text
            self._write()
            if unexplained is self._without_inventory:
                self._inventories.add_out_of_memory(unexplained)
            return
        cuda = self._torch.cuda
        device = (
            "cpu"
            if on_cpu or not cuda.is_initialized()
            else f"cuda:{cuda.current_device()}"
        )
        heap = None
        # else the message has the figure of that moment
        if device == "cpu" and "allocated by" not in text:
            heap = next(
                (size for pool, _, size in recorder.read_memory() if pool == HEAP), None
            )
        self._add(device=device, allocated_bytes=heap, message=text)

    def _add(self, **figures: Any) -> dict[str, Any] | None:
        """Add a record and an inventory; return None if there are enough, or nothing is
        recorded now."""
        recorder = self._recorder
        if len(self._records) >= _MAX_ERRORS or not recorder.begin_error():
            return None
        t_ns, iteration = time.monotonic_ns(), recorder.iteration
        phase = PHASES[recorder.phase] if recorder.in_phase else "other"
        record = {
            "t_ns": t_ns,
            "iteration": iteration,
            "phase": phase,
            "message": None,
            **figures,
        }
        self._records.append(record)
        self._write()
        # The process may end at once: what is cheap and certain was written first.
        self._without_inventory = (
            None if self._inventories.add_out_of_memory(record) else record
        )
        return record

    def _write(self) -> None:
        self._recorder.job_info.set("out_of_memory", self._records)
        self._recorder.flush()
