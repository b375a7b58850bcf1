"""Calls a function before a method of an object, until it is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MethodGate:
    """Replaces a method of one object by one that first calls a function with the same arguments.

    Several gates of one method may be removed in any order.

    Args:
        owner: The object.
        name: The name of the method.
        before: The function. What it raises, the method raises.
    """

    def __init__(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        self._owner = owner
        self._name = name
        self._is_removed = False
        self._is_own_attribute = name in vars(owner)
        self._method = method = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            if not self._is_removed:
                before(*args, **kwargs)
            return method(*args, **kwargs)

        # torch.compile must not trace it: what it waits for changes.
        self._gated = torch._disable_dynamo(gated)
        setattr(owner, name, self._gated)

    def remove(self) -> None:
        """Call the function no longer."""
        self._is_removed = True
        if vars(self._owner).get(self._name) is not self._gated:
            # Another gate calls this one.
            return
        if self._is_own_attribute:
            setattr(self._owner, self._name, self._method)
        else:
            delattr(self._owner, self._name)
