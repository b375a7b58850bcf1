"""The modules that a job calls, for policies whose updates end under its forward."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch

from ebbtide.interleave.policies import as_policy

# Texts of a run that are no policies.
_OTHERS = ("none", "static")


def needs_model(text: str) -> bool:
    """Return whether updates of a run's policy may end under the next forward."""
    overlaps = ("forward", "both", "auto")
    return text not in _OTHERS and as_policy(text).overlap in overlaps


class CalledModels:
    """Notes the modules that are called, in the order of their first calls.

    Modules inside others are called after them.
    """

    def __init__(self) -> None:
        self._called: weakref.WeakKeyDictionary[torch.nn.Module, None]
        self._called = weakref.WeakKeyDictionary()
        register = torch.nn.modules.module.register_module_forward_pre_hook
        self._handle = register(self._note)

    def with_params(
        self, params: Collection[torch.nn.Parameter]
    ) -> torch.nn.Module | None:
        """Return the outermost module that has all of some parameters, None if none
        has."""
        for module in self._called:
            if set(params).issubset(module.parameters()):
                return module
        return None

    def close(self) -> None:
        """Note no further calls."""
        self._handle.remove()

    def _note(self, module: torch.nn.Module, _: Any) -> None:
        self._called.setdefault(module)
