"""Records from inside a script: `with Tracer("run.ebb"): train()`."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ebbtide.errors import TraceError
from ebbtide.phases import PHASES, UPDATE
from ebbtide.profiler.agent import start
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording.lifecycle import (
    OpenRecording,
    finish_recording,
    open_recording,
    require_linux,
    spool_folder,
)
from ebbtide.profiler.trace.files import new_trace
from ebbtide.profiler.trace.trace import Trace
from ebbtide.units import ByteCount, byte_count


class Tracer:
    """Records this process while the `with` block runs, as `ebbtide profile` would.

    Under `ebbtide profile` the process is recorded already: the tracer then only adds
    the phases marked by `phase`, and `path` is not used. The samples come from threads
    of this process, so they share its interpreter lock; `ebbtide profile` takes them
    from outside.

    Args:
        path: The trace to write.
        iterations: First iteration to record, and the end (exclusive); None: to the end
            of the block.
        allocator_iterations: Number of iterations in which every allocation is
            recorded, with call stacks.
        transfers: Whether to record copies and kernels of the GPU (CUPTI).
        max_bytes: Size limit of the process's spool, in bytes, or as text such as
            `2GiB`; None: no limit.
        poll_ms: Interval of memory readings between phase boundaries, in ms; 0: none.
        memory: Whether to read the memory of the process.
        on_demand: Record phases alone, until `ebbtide profile --attach` asks for a
            detailed slice. It excludes `iterations`, `allocator_iterations` and
            `transfers`, which are options of the slice then.
        force: Whether to replace a trace that exists.

    Attributes:
        path: The trace to write.
        trace: After the block, what was recorded; None if nothing was.
        warnings: After the block, one line for each thing that is incomplete.

    Raises:
        ValueError: If an option is given that `on_demand` excludes.
        TraceError: On entry, if `path` exists (see `force`) or cannot be written, or
            this torch or platform cannot be recorded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        iterations: tuple[int, int | None] = (0, None),
        allocator_iterations: int = 0,
        transfers: bool = False,
        max_bytes: ByteCount | None = None,
        poll_ms: float = 25.0,
        memory: bool = True,
        on_demand: bool = False,
        force: bool = False,
    ) -> None:
        self.path = Path(path)
        self.trace: Trace | None = None
        self.warnings: list[str] = []
        self._force = force
        first, last = iterations
        if on_demand and (
            first or last is not None or allocator_iterations or transfers
        ):
            raise ValueError(
                "on_demand records phases alone: ask for the rest with `ebbtide "
                "profile --attach`"
            )
        limit = None if max_bytes is None else int(byte_count(max_bytes, "max_bytes"))
        self._options = Options(
            first,
            last,
            limit,
            poll_ms,
            allocator_iterations,
            transfers,
            memory and not on_demand,
            on_demand,
        )
        self._recorder: Any = None
        self._recording: OpenRecording | None = None

    def __enter__(self) -> Tracer:
        import torch

        self._recorder = start.current_recorder()
        if self._recorder is not None:
            return self
        require_linux()
        with new_trace(self.path, self._force, recording=True):
            recording = open_recording(
                self.path, list(sys.argv), self._options, os.getpid()
            )
            self._recorder = start.start(
                torch, str(spool_folder(self.path)), self._options
            )
            if self._recorder is None:
                raise TraceError(
                    f"cannot record with torch {torch.__version__}: see "
                    "docs/recording.md"
                )
        self._recording = recording
        recording.sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        start.stop()
        recording.sampler.stop()
        result = finish_recording(recording, {}, self._options.first)
        os.close(recording.lock)
        self.trace, self.warnings = next(iter(result.traces), None), result.warnings
        for warning in self.warnings:
            warnings.warn(f"ebbtide: {warning}", stacklevel=2)

    @contextlib.contextmanager
    def phase(self, phase: Literal["forward", "backward", "update"]) -> Iterator[None]:
        """Mark a phase by hand, where it cannot be detected.

        An example is a step compiled as one function.

        Phases detected inside it belong to it. An update that follows a backward ends
        an iteration, as an optimizer's step does.

        Raises:
            ValueError: If `phase` is not a phase.
            RuntimeError: If the tracer's `with` block has not been entered.
        """
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not a phase: forward, backward or update")
        recorder = self._recorder
        if recorder is None:
            raise RuntimeError("phase() was called outside of the tracer's with block")
        outermost = recorder.enter(PHASES.index(phase))
        try:
            yield
        finally:
            if outermost:
                if phase == UPDATE:
                    recorder.stepped.append(_ManualOptimizer)
                recorder.leave()


class _ManualOptimizer:
    """Represents the optimizer of updates that are marked by hand."""
