"""Plugs the records of out-of-memory errors into the agent."""

from __future__ import annotations

from typing import Callable

from ebbtide.profiler.agent.exceptions import ExceptionHooks
from ebbtide.profiler.agent.inventories import Inventories
from ebbtide.profiler.agent.recorder import Recorder

from .out_of_memory import OutOfMemoryWatch


def install(recorder: Recorder) -> Callable[[], None]:
    """Record out-of-memory errors, and what holds memory in typical updates.

    Return a function that stops that.
    """
    if not recorder.options.memory:
        return lambda: None

    def listen() -> None:
        inventories = Inventories(recorder, recorder.options)
        recorder.on_iteration.append(inventories.enter_iteration)
        recorder.on_update.append(inventories.enter_update)
        errors = OutOfMemoryWatch(recorder, inventories)
        recorder.on_iteration.append(errors.attach_observer)
        recorder.on_error.append(errors.see)

    listen()
    recorder.on_restart.append(listen)
    return ExceptionHooks(recorder.report_error).remove
