"""Temporary replacements of attributes of the job's classes and modules."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any, Callable

from .frames import hidden, hide_frame

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
Wrappers = Mapping[str, Mapping[str, Wrapper]]


def wrapper(hook: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Turn a hook into a wrapper of functions.

    A call of the wrapped function calls the hook, with the function first; the object
    of a method and settings that the wrapper is bound to come before it.
    """

    hide_frame(hook)

    def wrap(*arguments: Any) -> Callable[..., Any]:
        return functools.update_wrapper(
            hidden(functools.partial(hook, *arguments)), arguments[-1]
        )

    return wrap


def when_imported(
    name: str, callback: Callable[[Any], Any], begins: Callable[[], Any] = lambda: None
) -> Callable[[], None]:
    """Call `callback` with a module once it is imported.

    `begins` is called when its import begins. Exceptions of both are dropped. Return a
    function to cancel it.
    """
    module = sys.modules.get(name)
    if module is not None:
        with contextlib.suppress(Exception):
            callback(module)
        return lambda: None
    finder = ImportFinder(name, callback, begins)
    sys.meta_path.insert(0, finder)
    return finder.remove


class ImportFinder:
    """A finder on `sys.meta_path` that passes one module through, calls back after its
    import, and removes itself."""

    def __init__(
        self, name: str, callback: Callable[[Any], Any], begins: Callable[[], Any]
    ) -> None:
        self._name = name
        self._callback = callback
        self._begins = begins
        self._searching = False

    def remove(self) -> None:
        """Take the finder off `sys.meta_path`, if it is still there."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders give, with a loader that calls back.

        Return None for other modules.
        """
        if name != self._name or self._searching:
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

        @hidden
        def exec_module(module: Any) -> None:
            # restores the loader before its module can be looked at
            vars(loader).pop("exec_module", None)
            with contextlib.suppress(Exception):
                self._begins()
            execute(module)
            if self in sys.meta_path:
                self.remove()
                with contextlib.suppress(Exception):
                    self._callback(module)

        loader.exec_module = exec_module
        return spec


_MISSING = object()


class Patches:
    """Replaces attributes, and restores all of them at `undo`, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of `owner`, which it may inherit or lack."""
        self.on_undo(
            functools.partial(_restore, owner, name, owner.__dict__.get(name, _MISSING))
        )
        setattr(owner, name, value)

    def set_code(self, function: Any, code: CodeType) -> None:
        """Replace the code of a function."""
        self.on_undo(
            functools.partial(setattr, function, "__code__", function.__code__)
        )
        function.__code__ = code

    def set_variables(self, values: Mapping[str, str]) -> None:
        """Set variables of the environment."""
        for name, value in values.items():
            before = os.environ.get(name)
            restore = functools.partial(os.environ.__setitem__, name, before or "")
            self.on_undo(
                functools.partial(os.environ.pop, name, None)
                if before is None
                else restore
            )
            os.environ[name] = value

    def on_undo(self, function: Callable[[], Any]) -> None:
        """Call a function at `undo`."""
        self._undo.append(function)

    def when_imported(self, name: str, callback: Callable[[Any], Any]) -> None:
        """Do what `when_imported` does, until `undo`."""
        self.on_undo(when_imported(name, callback))

    def wrap_when_imported(self, module: str, wrappers: Wrappers) -> None:
        """Do what `wrap` does to functions once their module is imported.

        The functions are given by their class ("": none) and name.
        """

        def patch(imported: Any) -> None:
            for owner, methods in wrappers.items():
                for name, wrapper in methods.items():
                    self.wrap(
                        getattr(imported, owner, None) if owner else imported,
                        name,
                        wrapper,
                    )

        self.when_imported(module, patch)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace an attribute by `wrapper(original)`.

        Do nothing if `owner` itself does not have it.
        """
        original = getattr(owner, "__dict__", {}).get(name)
        if original is not None:
            self.set(owner, name, wrapper(original))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore(owner: Any, name: str, original: Any) -> None:
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
