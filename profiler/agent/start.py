"""Starts the agent: at once, or as soon as the job imports torch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from typing import Any

from .feature_agents import feature_hooks, load_feature_agents
from .options import ERRORS_ONLY, OUT_OF_MEMORY, SPOOL_DIRECTORY, Options
from .patches import ImportFinder, when_imported

# The recorder of this process, once torch is imported.
_recorder: Any = None


def from_environment() -> None:
    """Record this process if the environment asks for it, once it imports torch, if
    ever. Never raises."""
    directory, errors = os.environ.get(SPOOL_DIRECTORY), os.environ.get(OUT_OF_MEMORY)
    if (
        not (directory or errors)
        or _recorder is not None
        or any(isinstance(f, ImportFinder) for f in sys.meta_path)
    ):
        return
    with contextlib.suppress(Exception):
        load_feature_agents()
        if not directory:
            when_imported("torch", lambda torch: start_for_errors(torch, str(errors)))
            return
        options = Options.from_environment()
        _write_marker(directory, "python")
        # The collector waits for a process that imports torch, however long that takes.
        begins = functools.partial(_write_marker, directory, "torch")
        when_imported("torch", lambda torch: start(torch, directory, options), begins)


def start(torch: Any, directory: str, options: Options) -> Any:
    """Start to record this process.

    Return its recorder, maybe an earlier one, or None if it cannot be recorded.
    """
    global _recorder
    if _recorder is not None and _recorder.errors_only and not options.errors_only:
        stop()
    if _recorder is not None:
        return _recorder
    _write_marker(directory, "torch")
    try:
        # Imported here, so that a process without torch loads none of it.
        from .named_ranges import record_named_ranges
        from .phase_hooks import TorchHooks
        from .recorder import Recorder

        recorder = Recorder(torch, directory, options)
        recorder.on_close.append(TorchHooks(recorder, torch).remove)
        recorder.on_close.append(record_named_ranges(recorder))
        for agent_hook in feature_hooks():
            recorder.on_close.append(agent_hook.install(recorder))
    except Exception as error:
        _write_marker(
            directory,
            "failed",
            f"torch {getattr(torch, '__version__', '?')}: {error!r}",
        )
        return None
    atexit.register(recorder.close)
    _recorder = recorder
    return recorder


def start_for_errors(torch: Any, path: str) -> Any:
    """Record out-of-memory errors alone, unless this process is recorded already. Never
    raises."""
    try:
        from .process_recorder import spool_folder

        return start(torch, spool_folder(path), ERRORS_ONLY)
    except Exception:
        return None


def current_recorder() -> Any:
    """Return the recorder of this process, or None if only errors are recorded."""
    recorder = _recorder
    return (
        recorder
        if recorder is not None and recorder.live and not recorder.errors_only
        else None
    )


def stop() -> None:
    """Close the recorder of this process, so that another can be started."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        atexit.unregister(recorder.close)
        recorder.close()


def _write_marker(directory: str, stage: str, text: str = "") -> None:
    """Note how far this process came.

    `ebbtide profile` uses it to explain why nothing was recorded.
    """
    with (
        contextlib.suppress(OSError),
        open(os.path.join(directory, f"{stage}-{os.getpid()}"), "w") as file,
    ):
        file.write(text)
