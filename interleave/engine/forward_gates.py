"""Lets the forward of a model wait for parameters that late operations have not written yet."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils._pytree import tree_leaves

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.gates.method_gate import MethodGate
from ebbtide.interleave.engine.gates.sharded_gates import ShardedGates
from ebbtide.interleave.engine.module_copies import HooklessCopies

log = logging.getLogger("ebbtide")

Wait = Callable[[Sequence[torch.Tensor]], None]
# Functions whose arguments do not wait by themselves, as of scripted code: see LateParams.
_READERS: list[tuple[Any, str]] = [
    (torch.jit.ScriptFunction, "__call__"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (vmap, "_add_batch_dim"),
]


class _Removable(Protocol):
    def remove(self) -> None: ...


class _ModuleGate:
    """Waits before the forward of a module, for the parameters that it reads.

    Attributes:
        params: The parameters to wait for.
        is_called: Whether the module was called, but for evaluations.
    """

    def __init__(self, params: Sequence[torch.Tensor], all_params: Sequence[torch.Tensor], wait: Wait) -> None:
        self.params = list(params)
        self.is_called = False
        self._all_params = all_params
        self._wait = wait

    def before_forward(self, module: torch.nn.Module) -> None:
        """Wait until the parameters are written."""
        if module.training or torch.is_grad_enabled():
            self.is_called = True
            self._wait(self.params)
        else:
            # Attention and transformer layers of torch then read parameters of their children without calling them.
            self._wait(self._all_params)


class ForwardGates:
    """Hooks before everything in a model that uses parameters: forwards and gathers of shards.

    Which modules are called is known after the first iteration. Parameters of others, as of a projection that an
    attention layer reads itself, are waited for by the nearest called module around them. Until then, none may be late.

    Copies and pickles of any module have no hooks.

    Args:
        model: The module whose forward uses the parameters.
        wait: Waits until parameters are written. The model keeps it alive: pass a function with a weak reference.
        finish: Waits until all late operations have ended. Also kept alive.

    Raises:
        EngineError: The model is not a module, or shards or converts its parameters in a way that is not supported.

    Attributes:
        names: The parameters of the model, and their names.
        sharded: The parameters that `fully_shard` has sharded.
    """

    def __init__(self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise EngineError(
                f"model is {model!r:.60}: it must be the torch.nn.Module whose forward uses the parameters"
            )
        # Parameters are fixed now: functional_call replaces them for the time of a call.
        self.names: dict[torch.Tensor, str] = {}
        self.sharded: set[torch.Tensor] = set()
        self._model = weakref.ref(model)
        self._module_gates: dict[torch.nn.Module, _ModuleGate] = {}
        self._gated: set[torch.Tensor] = set()
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

    def is_gated(self, param: torch.Tensor) -> bool:
        """Return whether something waits for a parameter before the forward reads it."""
        return param in self._gated or param in self.sharded

    def learn_calls(self) -> None:
        """Let called modules wait for the parameters of those that are not called, after the first iteration."""
        model = self._model()
        if self._gated or model is None or not any(gate.is_called for gate in self._module_gates.values()):
            return
        params_of: dict[_ModuleGate, dict[torch.Tensor, None]] = {}
        stack: list[tuple[torch.nn.Module, _ModuleGate | None]] = [(model, None)]
        visited: set[tuple[torch.nn.Module, _ModuleGate | None]] = set()
        while stack:
            module, called_gate = stack.pop()
            gate = self._module_gates.get(module)
            if gate is not None and gate.is_called:
                called_gate = gate
            if (module, called_gate) in visited:
                continue
            visited.add((module, called_gate))
            stack += [(child, called_gate) for child in module.children()]
            if called_gate is not None:
                params_of.setdefault(called_gate, {}).update(dict.fromkeys(self._own_params(module)))
        for gate in self._module_gates.values():
            # A module that is called later for the first time still waits for its own.
            gate.params = [*dict.fromkeys([*gate.params, *params_of.get(gate, ())])]
        self._gated = {param for params in params_of.values() for param in params}
        ungated = [name for param, name in self.names.items() if not self.is_gated(param)]
        if ungated:
            log.info("ebbtide: step() waits for %s parameters that no called module has: %s", len(ungated), ungated[0])

    def _own_params(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [param for param in module.parameters(recurse=False) if param not in self.sharded]

    def _add_gates(self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]) -> None:
        if any(hasattr(param, "_mp_param") for param in model.parameters()):
            raise EngineError(
                "overlap is not supported with mixed_precision of DistributedDataParallel, which converts all "
                "parameters before the forward: use autocast, or leave out overlap and model"
            )
        sharded = ShardedGates(model, wait)
        self._removables.append(sharded)
        self.sharded = sharded.params
        self.names = dict.fromkeys(sharded.params, "of fully_shard")
        self.names |= {param: name for name, param in model.named_parameters()}
        # A graph reads all that it has read before, at addresses that are fixed.
        self._removables.append(MethodGate(torch.cuda.CUDAGraph, "replay", lambda *_: finish()))
        for owner, name in _READERS:
            self._removables.append(MethodGate(owner, name, lambda *args, **kwargs: wait(_tensors(args, kwargs))))
        hook_ids: set[int] = set()
        # Scripted modules have no hooks.
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        for module in modules:
            own_params = self._own_params(module)
            if any(hasattr(param, "to_local") for param in own_params):
                raise EngineError(
                    "overlap is not supported with DTensors that fully_shard did not make (tensor parallelism): "
                    "leave out overlap and model"
                )
            handles = []
            if all_params := [param for param in module.parameters() if param not in self.sharded]:
                gate = self._module_gates[module] = _ModuleGate(own_params, all_params, wait)
                hook = _untraced(lambda module, *_, gate=gate: gate.before_forward(module))
                handles.append(module.register_forward_pre_hook(hook, prepend=True))
            if params := list(module.parameters(recurse=False)):
                # They would wait by themselves, but ReadChecks would report them.
                hook = _untraced(lambda *_, params=params: wait(params))
                handles.append(module.register_state_dict_pre_hook(hook))
                handles.append(module.register_load_state_dict_pre_hook(hook))
            hook_ids |= {handle.id for handle in handles}
            self._removables += handles
        self._removables += [HooklessCopies(module, hook_ids) for module in modules]


def _tensors(*arguments: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a function that torch.compile does not trace, since what it waits for changes."""
    untraced: Callable[..., None] = torch._disable_dynamo(hook)
    return untraced
