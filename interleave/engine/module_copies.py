"""Leaves hooks out of copies and pickles of modules."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch

_NAME = "__getstate__"


class HooklessCopies:
    """Leaves hooks out of what `copy` and `pickle` (as in `torch.save`) read of a module: its `__getstate__`.

    Args:
        module: The module.
        hook_ids: The ids of hooks that copies must not have.
    """

    def __init__(self, module: torch.nn.Module, hook_ids: Collection[int]) -> None:
        self._module = weakref.ref(module)
        self._hook_ids = hook_ids
        # That of another optimizer.
        self._next: HooklessCopies | None = module.__dict__.get(_NAME)
        object.__setattr__(module, _NAME, self)

    def remove(self) -> None:
        """Leave the module as it was, unless another optimizer has replaced its method, too."""
        module = self._module()
        if module is not None and module.__dict__.get(_NAME) is self and self._next is None:
            object.__delattr__(module, _NAME)

    def __call__(self) -> Any:
        """Return the state of the module."""
        module = self._module()
        state = self._next() if self._next is not None else type(module).__getstate__(module)  # type: ignore[call-arg]
        if not isinstance(state, dict):
            return state
        return {name: self._without_hooks(value) for name, value in state.items() if name != _NAME}

    def _without_hooks(self, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys().isdisjoint(self._hook_ids):
            return value
        return type(value)((key, hook) for key, hook in value.items() if key not in self._hook_ids)
