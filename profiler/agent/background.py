"""The agent's background thread: flushes the spool, and reads memory between phase boundaries."""

from __future__ import annotations

import _thread
import time
from typing import Any

from .memory_reader import MemoryReader
from .spool import Spool

_FLUSH_SECONDS = 0.25
# Memory readings between phase boundaries may take one part in so many of the time.
_POLL_SHARE = 500


def start_background(recorder: Any, spool: Spool, memory: MemoryReader) -> None:
    """Start the thread of a `ProcessRecorder`, which ends with its recording.

    It is not a `threading` thread: the job's list of threads does not change, and its exit does not wait.
    """
    _thread.start_new_thread(_run, (recorder, spool, memory))


def _run(recorder: Any, spool: Spool, memory: MemoryReader) -> None:
    flushed_s = time.monotonic()
    while recorder.live and spool.is_open:
        period_s = recorder.poll_ms / 1e3
        recorder.wake.acquire(True, max(period_s, memory.cost_ns * _POLL_SHARE / 1e9) if period_s else _FLUSH_SECONDS)
        try:
            # The first reading is that of a phase, whose device this thread then reads.
            if period_s and recorder.recording and memory.cost_ns:
                recorder.put_memory(time.monotonic_ns(), memory.read())
            if time.monotonic() - flushed_s >= _FLUSH_SECONDS:
                spool.flush()
                for listener in recorder.on_flush:
                    listener()
                flushed_s = time.monotonic()
                if spool.full:
                    recorder.close("max-size")
        except Exception as error:
            recorder.fail(error)
