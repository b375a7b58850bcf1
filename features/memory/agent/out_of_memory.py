"""Records the out-of-memory errors of a job."""

from __future__ import annotations

import time
from typing import Any

from ebbtide.profiler.agent.inventories import Inventories
from ebbtide.profiler.agent.memory_reader import ALLOCATED, HEAP, RESERVED
from ebbtide.profiler.agent.recorder import Recorder
from ebbtide.profiler.agent.spool import PHASES

_MAX_ERRORS = 3
_MAX_MESSAGE = 2000
_NOT_OBSERVED_NOTE = (
    "out-of-memory errors are recorded from exceptions alone: the job's CUDA allocator "
    "is not torch's own, and does "
    "not report them"
)


class OutOfMemoryWatch:
    """Records out-of-memory errors, up to a number, from torch's observer on CUDA, and
    from exceptions."""

    def __init__(self, recorder: Recorder, inventories: Inventories) -> None:
        self._recorder = recorder
        self._torch = torch = recorder.torch
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
        """Record an allocation that failed.

        Called by torch inside of the allocation, on any thread; never raises.
        """
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
        """Record an exception if it says that memory ran out.

        Do nothing if it was recorded before.
        """
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
        """Add a record and an inventory.

        Return None if there are enough, or nothing is recorded now.
        """
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
