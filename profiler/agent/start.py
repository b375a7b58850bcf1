"""Starting the agent: at once, or as soon as the job imports torch."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
from typing import Any, Callable

from .options import SPOOL_DIRECTORY, Options

# The recorder of this process, once torch is there.
_running: list[Any] = []


def from_environment() -> None:
    """Record this process if the environment asks for it and it ever imports torch. Never raises."""
    directory = os.environ.get(SPOOL_DIRECTORY)
    if not directory or _running or any(isinstance(f, _TorchFinder) for f in sys.meta_path):
        return
    with contextlib.suppress(Exception):
        options = Options.from_environment()
        _leave(directory, "python")
        when_torch_is_imported(lambda torch: start(torch, directory, options))


def start(torch: Any, directory: str, options: Options) -> Any:
    """Record this process into `directory` from here on; returns the recorder, or None where it cannot be."""
    if _running:
        return _running[0]
    _leave(directory, "torch")
    try:
        # Here, so that a process without torch loads none of it.
        from .hooks import Hooks
        from .recorder import Recorder
        from .slices import attach_slices

        recorder = Recorder(torch, directory, options)
        hooks = Hooks(recorder, torch)
        recorder.on_close.append(hooks.remove)
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


def when_torch_is_imported(callback: Callable[[Any], Any]) -> None:
    if "torch" in sys.modules:
        callback(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _TorchFinder(callback))


class _TorchFinder:
    """Finds torch as it would have been found, and calls back once its import is over. Then it is gone."""

    def __init__(self, callback: Callable[[Any], Any]) -> None:
        self._callback = callback
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module  # the loader is as it was before its module can be looked at
            execute(module)
            with contextlib.suppress(Exception):
                sys.meta_path.remove(self)
                self._callback(module)

        loader.exec_module = exec_module
        return spec


def _leave(directory: str, stage: str, text: str = "") -> None:
    """A mark of how far this process came, by which `profile` can say why nothing was recorded."""
    with contextlib.suppress(OSError), open(os.path.join(directory, f"{stage}-{os.getpid()}"), "w") as file:
        file.write(text)
