"""Lets the forward of a model wait for parameters that late operations have not written yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.gates.replica_gates import ReplicaGates
from ebbtide.interleave.engine.gates.sharded_gates import ShardedGates

Wait = Callable[[Sequence[torch.Tensor]], None]


class ForwardGates:
    """Hooks before everything in a model that uses parameters: forwards, gathers of shards, state dicts.

    Args:
        model: The module whose forward uses the parameters.
        wait: Waits until parameters are written. The model keeps it alive: pass a function with a weak reference.
        finish: Waits until all late operations have ended, before the job writes parameters. Also kept alive.

    Raises:
        EngineError: The model is not a module, or shards or converts its parameters in a way that is not supported.
    """

    def __init__(self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise EngineError(
                f"model is {model!r:.60}: it must be the torch.nn.Module whose forward uses the parameters"
            )
        self._removables: list[RemovableHandle | ShardedGates | ReplicaGates] = []
        try:
            self._add_gates(model, wait, finish)
        except BaseException:
            self.remove()
            raise
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            # What torch.compile has compiled before does not call the hooks, and would be used again without them.
            dynamo.reset()

    def check(self, params: Iterable[torch.Tensor]) -> None:
        """Check parameters. Raises EngineError if the model did not have them when the hooks were made."""
        if not self._params.issuperset(params):
            raise EngineError(
                "a parameter of the optimizer is not one of model's, so that nothing would wait for it: pass the "
                "module that contains all parameters as model"
            )

    def remove(self) -> None:
        """Remove the hooks."""
        for removable in self._removables:
            removable.remove()

    def _add_gates(self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]) -> None:
        self._removables.append(ReplicaGates(model, finish))
        sharded = ShardedGates(model, wait)
        self._removables.append(sharded)
        self._params = sharded.params.union(model.parameters())
        for module in model.modules():
            # Fixed now: functional_call replaces parameters for the time of a call.
            params = list(module.parameters(recurse=False))
            in_place = [param for param in params if param not in sharded.params]
            if any(hasattr(param, "to_local") for param in in_place):
                raise EngineError(
                    "overlap is not supported with DTensors that fully_shard did not make (tensor parallelism): "
                    "leave out overlap and model"
                )
            if in_place:
                self._removables.append(module.register_forward_pre_hook(_make_hook(in_place, wait), prepend=True))
            if params:
                # Its tensors are the parameters, and the job may load values into them.
                self._removables.append(module.register_state_dict_pre_hook(lambda *_: finish()))
                self._removables.append(module.register_load_state_dict_pre_hook(lambda *_: finish()))


def _make_hook(params: Sequence[torch.Tensor], wait: Wait) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        wait(params)

    # torch.compile must not trace it: what it waits for changes.
    untraced: Callable[..., None] = torch._disable_dynamo(hook)
    return untraced
