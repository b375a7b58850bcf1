"""Starting the agent: at once, or as soon as the job imports torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from .imports import ImportFinder, when_imported
from .options import SPOOL_DIRECTORY, Options

# The recorder of this process, once torch is there.
_running: list[Any] = []


def from_environment() -> None:
    """Record this process if the environment asks for it and it ever imports torch. Never raises."""
    directory = os.environ.get(SPOOL_DIRECTORY)
    if not directory or _running or any(isinstance(f, ImportFinder) for f in sys.meta_path):
        return
    with contextlib.suppress(Exception):
        options = Options.from_environment()
        _leave(directory, "python")
        when_imported("torch", lambda torch: start(torch, directory, options))


def start(torch: Any, directory: str, options: Options) -> Any:
    """Record this process into `directory` from here on; returns the recorder, or None where it cannot be."""
    if _running:
        return _running[0]
    _leave(directory, "torch")
    try:
        # Here, so that a process without torch loads none of it.
        from .deepspeed.hooks import DeepSpeedHooks
        from .detailed_capture import attach_slices
        from .hooks import Hooks
        from .recorder import Recorder

        recorder = Recorder(torch, directory, options)
        hooks = Hooks(recorder, torch)
        recorder.on_close.append(hooks.remove)
        recorder.on_close.append(DeepSpeedHooks(recorder, torch).remove)
        attach_slices(recorder, torch, options)
    except Exception as error:
        _leave(directory, "failed", f"torch {getattr(torch, '__version__', '?')}: {error!r}")
        return None
    atexit.register(recorder.close)
    _running.append(recorder)
    return recorder


def running() -> Any:
    """The recorder of this process, or None."""
    return _running[0] if _running and _running[0].live else None


def stop() -> None:
    """Close the recorder of this process, so that another can be started."""
    while _running:
        recorder = _running.pop()
        atexit.unregister(recorder.close)
        recorder.close()


def _leave(directory: str, stage: str, text: str = "") -> None:
    """A mark of how far this process came, by which `profile` can say why nothing was recorded."""
    with contextlib.suppress(OSError), open(os.path.join(directory, f"{stage}-{os.getpid()}"), "w") as file:
        file.write(text)
