"""Hooks before everything in a model that uses parameters, which wait for updates that
have not ended yet."""

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils._pytree import tree_leaves

from ebbtide import seams
from ebbtide.interleave.engine.errors import EngineError

log = logging.getLogger("ebbtide")

Wait = Callable[[Sequence[torch.Tensor]], None]
_GETSTATE = "__getstate__"
# Functions whose arguments do not wait by themselves, as of scripted code: see
# LateParams.
_READERS: list[tuple[Any, str]] = [
    (torch.jit.ScriptFunction, "__call__"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (vmap, "_add_batch_dim"),
]


class MethodGate:
    """Replaces a method of one object by one that first calls a function.

    The function has the same arguments, and may raise; the method then runs in a
    context.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._owner = owner
        self._name = name
        self._is_removed = False
        self._is_own_attribute = name in vars(owner)
        self._method = method = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            if self._is_removed:
                return method(*args, **kwargs)
            before(*args, **kwargs)
            with context():
                return method(*args, **kwargs)

        # torch.compile must not trace it: what it waits for changes.
        self._gated = torch._disable_dynamo(gated)
        setattr(owner, name, self._gated)

    def remove(self) -> None:
        self._is_removed = True
        if vars(self._owner).get(self._name) is not self._gated:
            # Another gate calls this one.
            return
        if self._is_own_attribute:
            setattr(self._owner, self._name, self._method)
        else:
            delattr(self._owner, self._name)


class HooklessCopies:
    """Leaves hooks of these ids out of a module's copies and pickles: replaces the
    `__getstate__` that `copy` and `pickle` (`torch.save`) read."""

    def __init__(self, module: torch.nn.Module, hook_ids: Collection[int]) -> None:
        self._module = weakref.ref(module)
        self._hook_ids = hook_ids
        # The replacement by another optimizer.
        self._next: HooklessCopies | None = module.__dict__.get(_GETSTATE)
        object.__setattr__(module, _GETSTATE, self)

    def remove(self) -> None:
        """Leave the module as it was.

        If another optimizer has replaced its method, too, the module is not restored.
        """
        module = self._module()
        if (
            module is not None
            and module.__dict__.get(_GETSTATE) is self
            and self._next is None
        ):
            object.__delattr__(module, _GETSTATE)

    def __call__(self) -> Any:
        module = self._module()
        if self._next is not None:
            state = self._next()
        else:
            state = type(module).__getstate__(module)  # type: ignore[call-arg]
        if not isinstance(state, dict):
            return state
        return {
            name: self._without_hooks(value)
            for name, value in state.items()
            if name != _GETSTATE
        }

    def _without_hooks(self, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys().isdisjoint(self._hook_ids):
            return value
        return type(value)(
            (key, hook) for key, hook in value.items() if key not in self._hook_ids
        )


@contextmanager
def _without_hooks(
    modules: Iterable[torch.nn.Module], hook_ids: Collection[int]
) -> Iterator[None]:
    """Return a context in which modules lack hooks of these ids before their
    forward."""
    all_hooks = [
        (module._forward_pre_hooks, dict(module._forward_pre_hooks))
        for module in modules
    ]
    for hooks, _ in all_hooks:
        for hook_id in hooks.keys() & hook_ids:
            del hooks[hook_id]
    try:
        yield
    finally:
        for hooks, before in all_hooks:
            hooks.clear()
            hooks.update(before)


class _Removable(Protocol):
    def remove(self) -> None: ...


class _ModuleGate:
    """Waits before the forward of a module, for the parameters that it reads."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        all_params: Sequence[torch.Tensor],
        wait: Wait,
    ) -> None:
        self.params = list(params)
        # But for evaluations.
        self.is_called = False
        self._all_params = all_params
        self._wait = wait

    def before_forward(self, module: torch.nn.Module) -> None:
        """Wait until the parameters are written."""
        if module.training or torch.is_grad_enabled():
            self.is_called = True
            self._wait(self.params)
        else:
            # Attention and transformer layers of torch then read parameters of their
            # children without calling them.
            self._wait(self._all_params)


class ForwardGates:
    """Hooks before everything in a model that uses parameters.

    They are on forwards and gathers of shards. No parameter may be late before the
    first iteration has shown which modules are called; the nearest called module around
    another one waits for its parameters. The model keeps `wait` and `finish` alive:
    pass weak references. Raises EngineError if the model is not a module, or shards or
    converts its parameters in a way that is not supported.
    """

    def __init__(
        self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise EngineError(
                f"model is {model!r:.60}: it must be the torch.nn.Module whose forward "
                "uses the parameters"
            )
        # Parameters are fixed now: functional_call replaces them for the time of a
        # call.
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
            # What torch.compile has compiled before does not call the hooks, and would
            # be used again without them.
            dynamo.reset()

    def remove(self) -> None:
        for removable in self._removables:
            removable.remove()

    def is_gated(self, param: torch.Tensor) -> bool:
        """Return whether something waits for a parameter before the forward's read."""
        return param in self._gated or param in self.sharded

    def learn_calls(self) -> None:
        """Let called modules wait for the parameters of modules that are not called,
        after the first iteration."""
        model = self._model()
        if (
            self._gated
            or model is None
            or not any(gate.is_called for gate in self._module_gates.values())
        ):
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
                params_of.setdefault(called_gate, {}).update(
                    dict.fromkeys(self._own_params(module))
                )
        for gate in self._module_gates.values():
            # A module that is called later for the first time still waits for its own.
            gate.params = [*dict.fromkeys([*gate.params, *params_of.get(gate, ())])]
        self._gated = {param for params in params_of.values() for param in params}
        ungated = [
            name for param, name in self.names.items() if not self.is_gated(param)
        ]
        if ungated:
            log.info(
                "ebbtide: step() waits for %s parameters that no called module has: %s",
                len(ungated),
                ungated[0],
            )

    def _own_params(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [
            param
            for param in module.parameters(recurse=False)
            if param not in self.sharded
        ]

    def _add_gates(
        self, model: torch.nn.Module, wait: Wait, finish: Callable[[], None]
    ) -> None:
        if any(hasattr(param, "_mp_param") for param in model.parameters()):
            raise EngineError(
                "overlap is not supported with mixed_precision of "
                "DistributedDataParallel, which converts all "
                "parameters before the forward: use autocast, or leave out overlap and "
                "model"
            )
        for make_gates in seams.load_all("gates"):
            gates = make_gates(model, wait)
            self._removables.append(gates)
            self.sharded |= gates.params
            self.names |= dict.fromkeys(gates.params, gates.title)
        self.names |= {param: name for name, param in model.named_parameters()}
        # A graph reads all that it has read before, at addresses that are fixed.
        # Waiting is no part of a capture.
        for name in ("capture_begin", "replay"):
            self._removables.append(
                MethodGate(torch.cuda.CUDAGraph, name, lambda *_, **__: finish())
            )
        for owner, name in _READERS:
            self._removables.append(
                MethodGate(
                    owner, name, lambda *args, **kwargs: wait(_tensors(args, kwargs))
                )
            )
        hook_ids: set[int] = set()
        # A module that is scripted gets the parameters as they are, and the hooks that
        # it has.
        without_hooks = partial(
            _without_hooks, weakref.WeakSet(model.modules()), hook_ids
        )
        scripting = MethodGate(
            torch.jit._recursive,
            "create_script_module",
            lambda *_, **__: finish(),
            without_hooks,
        )
        self._removables.append(scripting)
        # Scripted modules have no hooks.
        modules = [
            module
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        for module in modules:
            own_params = self._own_params(module)
            if any(hasattr(param, "to_local") for param in own_params):
                raise EngineError(
                    "overlap is not supported with DTensors that fully_shard did not "
                    "make (tensor parallelism): "
                    "leave out overlap and model"
                )
            if all_params := [
                param for param in module.parameters() if param not in self.sharded
            ]:
                gate = self._module_gates[module] = _ModuleGate(
                    own_params, all_params, wait
                )
                # torch.compile must not trace it: what it waits for changes.
                hook = torch._disable_dynamo(
                    lambda module, *_, gate=gate: gate.before_forward(module)
                )
                handle = module.register_forward_pre_hook(hook, prepend=True)
                hook_ids.add(handle.id)
                self._removables.append(handle)
        self._removables += [HooklessCopies(module, hook_ids) for module in modules]


def _tensors(*arguments: Any) -> list[torch.Tensor]:
    return [
        value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)
    ]
