"""Lets the forward of a model wait for parameters that late operations have not written yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.gates.replica_gates import ReplicaGates
from ebbtide.interleave.engine.gates.sharded_gates import ShardedGates
from ebbtide.interleave.engine.module_copies import CopyGate

Wait = Callable[[Sequence[torch.Tensor]], None]


class _Removable(Protocol):
    def remove(self) -> None: ...


class ForwardGates:
    """Hooks before everything in a model that uses parameters: forwards, gathers of shards, state dicts.

    Copies and pickles of any module wait for all its parameters, and have no hooks.

    Args:
        model: The module whose forward uses the parameters.
        wait: Waits until parameters are written. The model keeps it alive: pass a function with a weak reference.
        finish: Waits until all late operations have ended. Also kept alive.

    Raises:
        EngineError: The model is not a module, or shards or converts its parameters in a way that is not supported.

    Attributes:
        names: The parameters of the model, and their names.
    """

    def __init__(self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise EngineError(
                f"model is {model!r:.60}: it must be the torch.nn.Module whose forward uses the parameters"
            )
        # Parameters are fixed now: functional_call replaces them for the time of a call.
        self.names: dict[torch.Tensor, str] = {}
        self._removables: list[_Removable] = []
        try:
            self._add_gates(model, wait, finish)
        except BaseException:
            self.remove()
            raise
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            # What torch.compile has compiled before does not call the hooks, and would be used again without them.
            dynamo.reset()

    def remove(self) -> None:
        """Remove the hooks."""
        for removable in self._removables:
            removable.remove()

    def _add_gates(self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]) -> None:
        replicas = ReplicaGates(model, finish)
        self._removables.append(replicas)
        sharded = ShardedGates(model, wait)
        self._removables.append(sharded)
        self.names = dict.fromkeys(sharded.params, "of fully_shard")
        self.names |= {param: name for name, param in model.named_parameters()}
        hook_ids = replicas.hook_ids
        for module in model.modules():
            params = list(module.parameters(recurse=False))
            in_place = [param for param in params if param not in sharded.params]
            if any(hasattr(param, "to_local") for param in in_place):
                raise EngineError(
                    "overlap is not supported with DTensors that fully_shard did not make (tensor parallelism): "
                    "leave out overlap and model"
                )
            handles = []
            if in_place:
                handles.append(module.register_forward_pre_hook(_make_hook(in_place, wait), prepend=True))
            if params:
                # Its tensors are the parameters, and the job may load values into them.
                handles.append(module.register_state_dict_pre_hook(_make_hook(params, wait)))
                handles.append(module.register_load_state_dict_pre_hook(_make_hook(params, wait)))
            hook_ids |= {handle.id for handle in handles}
            self._removables += handles
        for module in model.modules():
            self._removables.append(CopyGate(module, partial(wait, list(module.parameters())), hook_ids))


def _make_hook(params: Sequence[torch.Tensor], wait: Wait) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        wait(params)

    # torch.compile must not trace it: what it waits for changes.
    untraced: Callable[..., None] = torch._disable_dynamo(hook)
    return untraced
