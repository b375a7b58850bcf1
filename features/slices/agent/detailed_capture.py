"""Captures that are too expensive for a whole job, over some of its iterations:
allocations, copies and kernels."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

from ebbtide.profiler.agent.inventory import list_blocks
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.agent.patches import Patches, wrapper
from ebbtide.profiler.agent.recorder import Recorder
from ebbtide.profiler.agent.threads import NOT_READ_NOTE

_KINETO_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "6"
_ERROR = 2
# The first iterations compile, tune and create optimizer state: the allocations of a
# later one are more typical.
_SETTLED_ITERATION = 2
_MAX_ENTRIES = 2_000_000
_MAX_CALLS = 1_000_000
_OTHER_THREAD = (
    "allocations were not recorded: on a CPU torch's profiler records them, and would "
    "crash the process if the thread "
    "that started it ended; let the main thread train"
)
_OWN_CAPTURE = (
    "allocations were not recorded to the end: the job uses a profiler or an allocator "
    "history of its own"
)
_NO_HISTORY = (
    "allocations were not recorded: cudaMallocAsync keeps no history of them; leave "
    "out backend:cudaMallocAsync"
)
# A slice is at most so long, and about as large (20,000 events); the first one is a
# single iteration.
_SLICE_NS, _SLICE_BYTES = 2_000_000_000, 5_000_000
# Slices may hold up one part in this number of the job's time, with an advance; after
# _UNPAUSED_NS pauses grow.
_HELD_SHARE, _ADVANCE_NS, _UNPAUSED_NS = 100, 1_000_000_000, 10_000_000_000


class GuardedProfiler:
    """A profiler of torch that runs beside the job: `running`, None if none does.
    CUPTI, and torch, serve one profiler at a time: `on_job_profiler`, which must stop
    it, is called before the job begins one of its own."""

    def __init__(self, torch: Any, on_job_profiler: Callable[[], None]) -> None:
        self.running: Any = None
        self._torch = torch
        self._on_job_profiler = on_job_profiler
        self._thread = 0
        # A profiler begins in one or the other of these.
        self._patches = Patches()
        for name in ("_prepare_trace", "__enter__"):
            self._patches.wrap(
                torch.autograd.profiler.profile, name, self._yield_to_job
            )

    def start(self, /, **options: Any) -> bool:
        """Start a profiler with options of `torch.profiler.profile`.

        Return False if the job has one of its own.
        """
        if self._torch._C._autograd._profiler_enabled():
            return False
        self._thread = _thread.get_ident()
        self.running = self._torch.profiler.profile(**options)
        with _without_log_lines():
            self.running.start()
        return True

    @property
    def on_its_thread(self) -> bool:
        """Whether this thread started the profiler. Only that one can stop it: torch
        crashes otherwise."""
        return self._thread == _thread.get_ident()

    def stop(self) -> Any:
        """Stop the profiler, and return it."""
        profiler, self.running = self.running, None
        with _without_log_lines():
            profiler.stop()
        return profiler

    def restore(self) -> None:
        """Restore torch's profiler."""
        self._patches.undo()

    @wrapper
    def _yield_to_job(
        self, original: Callable[..., Any], profiler: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap a method in which a profiler begins."""
        ours = self.running
        if ours is not None and getattr(ours, "profiler", None) not in (None, profiler):
            self._on_job_profiler()
        return original(profiler, *args, **kwargs)


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Keep Kineto from logging to the job's stderr.

    Kineto reads its level at its first start.
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
    """Keep torch's CPU allocator from warning of blocks older than the profiler."""
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


class AllocationCapture:
    """Captures the allocations of some iterations, from the history of the CUDA
    allocator, else from torch's profiler.

    Writes two files: the allocations as torch gives them, and what only the job knows:
    the owners of blocks by address, at several times of each iteration, and the calls
    of all modules."""

    def __init__(self, recorder: Recorder, options: Options) -> None:
        self._recorder = recorder
        self._torch = recorder.torch
        self._first = max(options.first, _SETTLED_ITERATION)
        self._last = self._first + options.allocator_iterations
        self._source: _History | _Profile | None = None
        self._ended = False
        self._pid = 0
        self._owners: list[Any] = []
        self._calls: list[tuple[int, str | None]] = []
        self._hooks: list[Any] = []

    def enter_iteration(self, iteration: int) -> None:
        """Start or stop the capture at the beginning of an iteration."""
        if iteration >= self._last:
            self.stop()
        elif iteration >= self._first and self._source is None and not self._ended:
            self._start()

    def enter_update(self) -> None:
        """Note the owners of blocks, also of gradients, at the start of an update."""
        if self._source is not None:
            self._add_owners()

    def _start(self) -> None:
        kind = _History if self._torch.cuda.is_initialized() else _Profile
        note = NOT_READ_NOTE if self._recorder.threads.several else None
        if note is None and kind is _Profile and not _on_main_thread():
            note = _OTHER_THREAD
        if note is None and kind is _History and not self._keeps_history():
            note = _NO_HISTORY
        source = None if note else kind(self._torch, self._yield_to_job)
        if source is None or not source.start():
            self._ended = True
            self._recorder.note_once(note or _OWN_CAPTURE)
            return
        self._source, self._pid = source, os.getpid()
        atexit.register(self.stop)
        self._add_owners()
        roots = self._recorder.model_and_optimizers()[0]
        for root in roots:
            self._hooks.append(
                root.register_forward_pre_hook(lambda *_: self._add_owners())
            )
            for name, module in root.named_modules():
                label = name or type(module).__name__
                self._hooks.append(
                    module.register_forward_pre_hook(
                        lambda *_, label=label: self._enter_module(label)
                    )
                )
                self._hooks.append(
                    module.register_forward_hook(
                        lambda *_: self._enter_module(None), always_call=True
                    )
                )
            self._hooks.append(
                root.register_forward_hook(lambda *_: self._add_owners())
            )

    def _keeps_history(self) -> bool:
        backend = getattr(self._torch.cuda, "get_allocator_backend", None)
        return backend is None or backend() == "native"

    def _enter_module(self, name: str | None) -> None:
        """Note the beginning of a module's call, or its end if the module is None."""
        if len(self._calls) < _MAX_CALLS:
            self._calls.append((time.monotonic_ns(), name))

    def _add_owners(self) -> None:
        try:
            owners = self._recorder.read_tensors(list_blocks)
            if owners is not None:
                self._owners.append((time.monotonic_ns(), owners))
        except Exception as error:  # in a forward of the job
            self._recorder.fail(error)

    def stop(self) -> None:
        """End the capture and write its files, if it runs. Torch's profiler must be
        stopped by the thread that started it: another one leaves that to the end of the
        job."""
        source = self._source
        if (
            source is None
            or self._pid != os.getpid()
            or (isinstance(source, _Profile) and not _on_main_thread())
        ):
            return
        self._source, self._ended = None, True
        atexit.unregister(self.stop)
        self._add_owners()
        for hook in self._hooks:
            hook.remove()
        name = f"allocations.{source.suffix}"
        path = self._recorder.job_info.path(name)
        if not source.write(path + ".new"):
            return
        description = {
            "file": os.path.basename(path),
            "device": source.device,
            "wall_to_monotonic_ns": time.monotonic_ns() - time.time_ns(),
            "owners": self._owners,
            "calls": self._calls,
        }
        os.replace(path + ".new", path)
        target = self._recorder.job_info.path("allocations-description.json")
        with open(target + ".new", "w", encoding="utf-8") as file:
            json.dump(description, file)
        os.replace(target + ".new", target)
        self._owners, self._calls = [], []
        if source.full:
            self._recorder.job_info.note(
                f"the allocator history holds only its last {_MAX_ENTRIES} events"
            )

    def _yield_to_job(self) -> None:
        """End the capture before the job begins a profiler of its own."""
        self.stop()
        self._recorder.job_info.note(_OWN_CAPTURE)


def _on_main_thread() -> bool:
    return _thread.get_ident() == threading.main_thread().ident


class _History:
    """The history of torch's CUDA allocator, as a memory snapshot."""

    suffix = "pickle"

    def __init__(self, torch: Any, on_job_profiler: Any) -> None:
        self._torch = torch
        self._memory = torch.cuda.memory
        self.device = f"cuda:{torch.cuda.current_device()}"
        self.full = False

    def start(self) -> bool:
        if self._torch._C._cuda_isHistoryEnabled():
            return False
        self._memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES
        )
        return True

    def write(self, path: str) -> bool:
        snapshot = self._memory._snapshot()
        self._memory._record_memory_history(enabled=None)
        self.full = any(
            len(events) >= _MAX_ENTRIES for events in snapshot["device_traces"]
        )
        with open(path, "wb") as file:
            pickle.dump(snapshot, file)
        return True


class _Profile:
    """The memory events of torch's profiler for the CPU's allocator, as a Chrome
    trace."""

    suffix = "json"
    device = "cpu"
    full = False

    def __init__(self, torch: Any, on_job_profiler: Any) -> None:
        self._profiler = GuardedProfiler(torch, on_job_profiler)
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        self._quiet = contextlib.ExitStack()
        self._torch = torch

    def start(self) -> bool:
        if not self._profiler.start(
            activities=self._activities, profile_memory=True, with_stack=True
        ):
            self._profiler.restore()
            return False
        self._quiet.enter_context(without_allocator_warnings(self._torch))
        return True

    def write(self, path: str) -> bool:
        self._quiet.close()
        self._profiler.restore()
        if self._profiler.running is None:
            return False
        profiler = self._profiler.stop()
        # Kineto would write a line to stderr.
        if not os.path.isdir(os.path.dirname(path)):
            return False
        profiler.export_chrome_trace(path)
        # Its events take hundreds of MB, and it refers to itself.
        profiler.profiler = None
        return True


class CopyCapture:
    """Records copies, kernels and the calls that launch them, from CUPTI through
    torch's profiler, in slices of whole iterations.

    Each slice is a Chrome trace, named for its span. Slices hold the job up, so they
    are short, with pauses unless `last` is set. If the job profiles itself, this
    capture ends with a note."""

    def __init__(self, recorder: Recorder, options: Options) -> None:
        self._recorder = recorder
        self._torch = recorder.torch
        self._options = options
        self._profiler = GuardedProfiler(recorder.torch, self._yield_to_job)
        self._first_ns = self._begin_ns = self._stop_ns = self._length_ns = 0
        self._held_ns = self._resume_ns = 0
        self._given_up = False

    def enter_iteration(self, iteration: int) -> None:
        """Stop or start the profiler at the beginning of an iteration."""
        if self._profiler.running is not None and not self._profiler.on_its_thread:
            # another thread trains as well; only the one that began the slice can end
            # it
            return
        now_ns, last = time.monotonic_ns(), self._options.last
        outside = iteration < self._options.first or (
            last is not None and iteration >= last
        )
        if outside or now_ns >= self._stop_ns:
            self.stop()
        if (
            self._profiler.running
            or outside
            or self._given_up
            or now_ns < self._resume_ns
        ):
            return
        if self._torch.cuda.is_initialized():
            self._start()

    def _start(self) -> None:
        begin_ns = time.monotonic_ns()
        if not self._profiler.start(
            activities=[self._torch.profiler.ProfilerActivity.CUDA]
        ):
            self._give_up("the job uses a profiler of its own")
            return
        self._begin_ns = begin_ns
        self._stop_ns, self._first_ns = (
            begin_ns + self._length_ns,
            self._first_ns or begin_ns,
        )

    def stop(self) -> None:
        """End the slice and write it, if one runs."""
        if self._profiler.running is None or self._given_up:
            return
        if not self._profiler.on_its_thread:
            self._give_up("the recording ended on another thread")
            return
        stop_ns = time.monotonic_ns()
        profiler = self._profiler.stop()
        # The profiler waits for the device, which runs behind the host: all that it ran
        # until now is in the slice.
        end_ns = time.monotonic_ns()
        path = self._recorder.job_info.path(f"copies-{self._begin_ns}-{end_ns}.json")
        profiler.export_chrome_trace(path + ".new")
        os.replace(path + ".new", path)
        self._length_ns = min(
            _SLICE_NS,
            (stop_ns - self._begin_ns) * _SLICE_BYTES // os.path.getsize(path),
        )
        self._held_ns += time.monotonic_ns() - stop_ns
        if self._options.last is None:
            pause_ns = max(0, stop_ns - self._first_ns - _UNPAUSED_NS)
            self._resume_ns = max(
                stop_ns + pause_ns,
                self._first_ns + _HELD_SHARE * (self._held_ns - _ADVANCE_NS),
            )

    def close(self) -> None:
        """End the slice, and restore torch's profiler."""
        self.stop()
        self._profiler.restore()

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._recorder.job_info.note(f"copies were not recorded to the end: {reason}")

    def _yield_to_job(self) -> None:
        """End the capture before the job begins a profiler of its own."""
        self.stop()
        self._give_up("the job uses a profiler of its own")
