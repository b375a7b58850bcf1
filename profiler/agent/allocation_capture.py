"""Captures every allocation of some iterations, with call stacks, modules and owners of the blocks."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import os
import pickle
import threading
import time
from typing import Any

from .inventory import list_blocks
from .options import Options
from .profiler_guard import GuardedProfiler, without_allocator_warnings
from .recorder import Recorder
from .threads import NOT_READ_NOTE

# The first iterations compile, tune and create optimizer state: the allocations of a later one are more typical.
_SETTLED_ITERATION = 2
_MAX_ENTRIES = 2_000_000
_MAX_CALLS = 1_000_000
_OTHER_THREAD = (
    "allocations were not recorded: on a CPU torch's profiler records them, and would crash the process if the thread "
    "that started it ended; let the main thread train"
)
_OWN_CAPTURE = "allocations were not recorded to the end: the job uses a profiler or an allocator history of its own"


class AllocationCapture:
    """Captures the allocations of some iterations: from the history of the CUDA allocator, else from torch's profiler.

    Writes two files: the allocations as torch gives them, and a description of what only the job knows: the owners of
    blocks (parameters, gradients, optimizer state) by address, at several times of each iteration, and the calls of
    all modules.
    """

    def __init__(self, recorder: Recorder, torch: Any, options: Options) -> None:
        self._recorder = recorder
        self._torch = torch
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
        """Note the owners of blocks, gradients among them, at the start of an update."""
        if self._source is not None:
            self._add_owners()

    def _start(self) -> None:
        kind = _History if self._torch.cuda.is_initialized() else _Profile
        note = NOT_READ_NOTE if self._recorder.threads.several else None
        if note is None and kind is _Profile and not _on_main_thread():
            note = _OTHER_THREAD
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
            self._hooks.append(root.register_forward_pre_hook(lambda *_: self._add_owners()))
            for name, module in root.named_modules():
                label = name or type(module).__name__
                self._hooks.append(module.register_forward_pre_hook(lambda *_, label=label: self._enter_module(label)))
                self._hooks.append(module.register_forward_hook(lambda *_: self._enter_module(None), always_call=True))
            self._hooks.append(root.register_forward_hook(lambda *_: self._add_owners()))

    def _enter_module(self, name: str | None) -> None:
        """Note the beginning of a module's call, or its end (None)."""
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
        """End the capture and write its files, if it runs.

        Torch's profiler must be stopped by the thread that started it: another one leaves that to the end of the job.
        """
        source = self._source
        if source is None or self._pid != os.getpid() or (isinstance(source, _Profile) and not _on_main_thread()):
            return
        self._source, self._ended = None, True
        atexit.unregister(self.stop)
        self._add_owners()
        for hook in self._hooks:
            hook.remove()
        name = f"allocations.{source.suffix}"
        path = self._recorder.files.path(name)
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
        target = self._recorder.files.path("allocations-description.json")
        with open(target + ".new", "w", encoding="utf-8") as file:
            json.dump(description, file)
        os.replace(target + ".new", target)
        self._owners, self._calls = [], []
        if source.full:
            self._recorder.files.job_info.note(f"the allocator history holds only its last {_MAX_ENTRIES} events")

    def _yield_to_job(self) -> None:
        """End the capture before the job begins a profiler of its own."""
        self.stop()
        self._recorder.files.job_info.note(_OWN_CAPTURE)


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
        self._memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES)
        return True

    def write(self, path: str) -> bool:
        snapshot = self._memory._snapshot()
        self._memory._record_memory_history(enabled=None)
        self.full = any(len(events) >= _MAX_ENTRIES for events in snapshot["device_traces"])
        with open(path, "wb") as file:
            pickle.dump(snapshot, file)
        return True


class _Profile:
    """The memory events of torch's profiler, as a Chrome trace; of the CPU's allocator."""

    suffix = "json"
    device = "cpu"
    full = False

    def __init__(self, torch: Any, on_job_profiler: Any) -> None:
        self._profiler = GuardedProfiler(torch, on_job_profiler)
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        self._quiet = contextlib.ExitStack()
        self._torch = torch

    def start(self) -> bool:
        if not self._profiler.start(activities=self._activities, profile_memory=True, with_stack=True):
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
        if not os.path.isdir(os.path.dirname(path)):  # Kineto would write a line to stderr.
            return False
        profiler.export_chrome_trace(path)
        # Its events take hundreds of MB, and it refers to itself.
        profiler.profiler = None
        return True
