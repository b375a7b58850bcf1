"""Runs torch's profiler for the recording, and ends it as soon as the job uses a profiler of its own."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any, Callable

_KINETO_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "6"
_ERROR = 2


class GuardedProfiler:
    """A profiler of torch that runs beside the job. CUPTI, and torch, serve one profiler at a time.

    `on_job_profiler` is called before the job begins a profiler of its own while this one runs, which it must stop.

    Attributes:
        running: The profiler that runs; None if none does.
    """

    def __init__(self, torch: Any, on_job_profiler: Callable[[], None]) -> None:
        self.running: Any = None
        self._torch = torch
        self._on_job_profiler = on_job_profiler
        self._thread = 0
        # A profiler begins in one or the other of these.
        self._profile = torch.autograd.profiler.profile
        methods = {name: self._profile.__dict__.get(name) for name in ("_prepare_trace", "__enter__")}
        self._originals = {name: method for name, method in methods.items() if method is not None}
        for name, method in self._originals.items():
            setattr(self._profile, name, self._yield_to_job(method))

    def start(self, **options: Any) -> bool:
        """Start a profiler with options of `torch.profiler.profile`; return False if the job has one of its own."""
        if self._torch._C._autograd._profiler_enabled():
            return False
        self._thread = _thread.get_ident()
        self.running = self._torch.profiler.profile(**options)
        with _without_log_lines():
            self.running.start()
        return True

    @property
    def on_its_thread(self) -> bool:
        """Whether this thread started the profiler. Only that one can stop it: torch crashes otherwise."""
        return self._thread == _thread.get_ident()

    def stop(self) -> Any:
        """Stop the profiler, and return it."""
        profiler, self.running = self.running, None
        with _without_log_lines():
            profiler.stop()
        return profiler

    def restore(self) -> None:
        """Restore torch's profiler."""
        for name, method in self._originals.items():
            setattr(self._profile, name, method)

    def _yield_to_job(self, original: Any) -> Any:
        """Wrap a method in which a profiler begins."""

        @functools.wraps(original)
        def begin(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self.running
            if ours is not None and getattr(ours, "profiler", None) not in (None, profiler):
                self._on_job_profiler()
            return original(profiler, *args, **kwargs)

        return begin


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Keep Kineto, which logs each start and stop, from writing to the job's stderr.

    Kineto reads its level from the environment when it starts first.
    """
    before = os.environ.get(_KINETO_LEVEL)
    os.environ.setdefault(_KINETO_LEVEL, _SILENT)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_KINETO_LEVEL, None)


@contextlib.contextmanager
def without_allocator_warnings(torch: Any) -> Iterator[None]:
    """Keep torch's CPU allocator from warning that blocks are older than the profiler."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, _ERROR)
    try:
        yield
    finally:
        level.value = before
