"""Lets copies and pickles of modules wait for parameters, and leaves hooks out of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

_NAME = "__getstate__"


class CopyGate:
    """Waits before `copy` and `pickle` (as in `torch.save`) read a module, and leaves hooks out of what they read.

    They ask an instance for its `__getstate__`, before they read any of its parts.

    Args:
        module: The module.
        wait: Waits until all parameters of the module are written.
        hook_ids: The ids of hooks that copies must not have.
    """

    def __init__(self, module: torch.nn.Module, wait: Callable[[], None], hook_ids: Collection[int]) -> None:
        self._module = weakref.ref(module)
        self._wait: Callable[[], None] | None = wait
        self._hook_ids = hook_ids
        # That of another optimizer.
        self._next: CopyGate | None = module.__dict__.get(_NAME)
        object.__setattr__(module, _NAME, self)

    def remove(self) -> None:
        """Read the module without waiting from now on."""
        self._wait = None
        module = self._module()
        if module is not None and module.__dict__.get(_NAME) is self and self._next is None:
            object.__delattr__(module, _NAME)

    def __call__(self) -> Any:
        """Return the state of the module."""
        if self._wait is not None:
            self._wait()
        module = self._module()
        state = self._next() if self._next is not None else type(module).__getstate__(module)  # type: ignore[call-arg]
        if not isinstance(state, dict):
            return state
        return {name: self._without_hooks(value) for name, value in state.items() if name != _NAME}

    def _without_hooks(self, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys().isdisjoint(self._hook_ids):
            return value
        return type(value)((key, hook) for key, hook in value.items() if key not in self._hook_ids)
