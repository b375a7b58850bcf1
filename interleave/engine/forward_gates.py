"""Lets the forward, state dicts and copies of a model wait for parameters that late operations have not written yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.module_copies import CopyGate


class ForwardGates:
    """Hooks before the forward, `state_dict` and `load_state_dict` of every module that has parameters of its own.

    Copies and pickles of any module wait for all its parameters, and have no hooks.

    Args:
        model: The module whose forward uses the parameters.
        wait: Waits until parameters are written. It is not kept alive by the model: pass a function with a weak
            reference.

    Raises:
        EngineError: The model is not a module, or shards its parameters.

    Attributes:
        names: The parameters of the model, and their names.
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
        # Parameters are fixed now: functional_call replaces them for the time of a call.
        self.names = {param: name for name, param in model.named_parameters()}
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            params = list(module.parameters(recurse=False))
            if not params:
                continue
            hook = _make_hook(params, wait)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(hook))
            self._handles.append(module.register_load_state_dict_pre_hook(hook))
        hook_ids = {handle.id for handle in self._handles}
        self._copy_gates = [
            CopyGate(module, partial(wait, list(module.parameters())), hook_ids) for module in model.modules()
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for gate in self._copy_gates:
            gate.remove()


def _make_hook(params: Sequence[torch.Tensor], wait: Callable[[Sequence[torch.Tensor]], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        wait(params)

    # torch.compile must not trace it: what it waits for changes.
    untraced: Callable[..., None] = torch._disable_dynamo(hook)
    return untraced
