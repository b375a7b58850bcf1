"""Lets the forward of a model wait for parameters that late operations have not written yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ebbtide.interleave.engine.errors import EngineError


class ForwardGates:
    """Hooks before the forward and the `state_dict` of every module that has parameters of its own.

    Args:
        model: The module whose forward uses the parameters.
        wait: Waits until parameters are written. It is not kept alive by the model: pass a function with a weak
            reference.

    Raises:
        EngineError: The model is not a module, or shards its parameters.
    """

    def __init__(self, model: torch.nn.Module, wait: Callable[[Sequence[torch.Tensor]], None]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise EngineError(
                f"model is {model!r:.60}: it must be the torch.nn.Module whose forward uses the parameters"
            )
        if any(hasattr(param, "to_local") for param in model.parameters()):
            raise EngineError(
                "overlap is not supported with fully_shard, which gathers parameters before a module's forward: "
                "choose overlap='none'"
            )
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            # What torch.compile has compiled before does not call the hooks, and would be used again without them.
            dynamo.reset()
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            # Fixed now: functional_call replaces parameters for the time of a call.
            params = list(module.parameters(recurse=False))
            if not params:
                continue
            hook = _make_hook(params, wait)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(hook))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _make_hook(params: Sequence[torch.Tensor], wait: Callable[[Sequence[torch.Tensor]], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        wait(params)

    # torch.compile must not trace it: what it waits for changes.
    untraced: Callable[..., None] = torch._disable_dynamo(hook)
    return untraced
