"""Parameters that a step may still write after it has returned: waits for them, and finds gradients of old values."""

import itertools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves

from ebbtide.features.overlap.gates import ForwardGates
from ebbtide.features.overlap.holders import ReferenceCounts
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forks import Rest, follow_forks, fork_lock
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.interleave.engine.rules.rule import Scalars

log = logging.getLogger("ebbtide")

Method = TypeVar("Method", bound=Callable[..., Any])

# How long a fork waits for a call on another thread.
_FORK_WAIT_S = 1.0
# Attributes and methods of a tensor that use no element of it.
_METADATA = (
    *("shape", "device", "dtype", "layout", "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_quantized", "is_mkldnn", "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr"),
    *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "size", "stride", "dim", "numel", "nelement"),
    *("element_size", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "get_device", "__len__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
)
# Those that give access to the memory: writes through them count no version of the tensor.
_MEMORY = ("data", "data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "share_memory_")


class PendingParams:
    """The parameters that the last step has updated, each unread until something has waited for it: gates of its model
    and LateParams do, and a gradient of an unread one is an error, since it would be one of old values."""

    def __init__(self, runner: AdaptiveRunner) -> None:
        # Held by whole calls of the optimizer from any thread; by hooks only while something is pending.
        self.lock = fork_lock()
        self._is_at_rest = False
        # The parameters of the guarded model, and their names; a step waits for all others.
        self.names: Mapping[torch.Tensor, str] = {}
        self._runner = runner
        self._gates: ForwardGates | None = None
        self._params: Sequence[torch.Tensor] = ()
        self._never_late: Container[int] = ()
        # The index of each parameter, which the forward of every module looks up.
        self._index: dict[torch.Tensor, int] = {}
        # Models, and the classes of late parameters, must not keep this object alive.
        self._weak_wait, self._weak_finish = weak_call(self.wait_for), weak_call(self.finish)
        self._late_params = LateParams(self._weak_wait, self._weak_finish)
        # Whether a step runs, or is not known to have ended. Read without the lock, so it is the last to be reset.
        self.is_active = False
        self._unread: set[int] = set()
        # The parameters that the last step has updated.
        self._updated: set[int] = set()
        self._holders = ReferenceCounts()
        # Those whose values were recorded since the last step, and the function that records them.
        self._recorded: set[int] = set()
        self._record: Callable[[Iterable[int]], None] | None = None

    def guard(self, model: torch.nn.Module) -> None:
        """Let the forward, state dicts and copies of a model wait. Raises EngineError if they cannot."""
        self._gates = ForwardGates(model, self._weak_wait, self._weak_finish)
        self.names = self._gates.names

    def remove_guards(self) -> None:
        """Let no model wait any more."""
        if self._gates is not None:
            self._gates.remove()

    def finish_after(self, owner: object) -> None:
        """Call `finish` when an object is deleted, before a fork, and before the process closes engines at its end."""
        weakref.finalize(owner, _finish_on_thread, self).atexit = False
        _unfinished.add(self)
        follow_forks(self, Rest.CALLS)

    def before_fork(self) -> None:
        # A step on another thread may never end.
        self._is_at_rest = self.lock.acquire(timeout=_FORK_WAIT_S)
        if self._is_at_rest:
            # The child has a copy of the parameters.
            _finish_or_log(self)

    def after_fork(self, in_child: bool) -> None:
        if self._is_at_rest:
            self.lock.release()
        elif in_child:
            self._runner.leave_behind("another thread was in a call of it")
            self.is_active = False
            self._release(list(self._unread))

    def set_params(self, params: Sequence[torch.Tensor], never_late: Container[int]) -> None:
        """Use these parameters from now on, by index, when nothing is pending. A step waits for `never_late`."""
        self._params, self._never_late = params, never_late
        self._index = {param: number for number, param in enumerate(params)}

    def begin_step(self) -> None:
        """Prepare for a step once the last has ended. Raises EngineError if an unread parameter has a gradient."""
        for index in self._unread:
            gradient = self._params[index].grad
            # Others are left from before, or are those of parameters that this iteration has not used.
            if gradient is not None and (gradient.layout != torch.strided or bool(local_shard(gradient).any())):
                self.check_gradient(index)
        self._release(list(self._unread))
        if self._gates is not None:
            self._gates.learn_calls()

    def step(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Scalars | None],
        on_done: Callable[[], None],
        record: Callable[[Iterable[int]], None],
    ) -> None:
        """Run `AdaptiveRunner.step`; afterwards updated parameters are pending if it has late operations. `record`,
        called when they are written, takes their values, by index, as those of the update."""
        updated = [index for index, factors in enumerate(scalars) if factors is not None]
        torch.autograd.graph.increment_version([self._params[index] for index in updated])
        self._updated, self._unread = set(updated), set(updated)
        self._recorded, self._record = set(), record
        self.is_active = True
        try:
            late = self._make_late(updated)
            self._runner.step(values, scalars, on_done, self._record_others)
            if self._runner.is_late:
                others = [index for index in updated if index not in late]
                self._runner.wait_for_params(others)
                self._release(others)
        finally:
            if not self._runner.is_late:
                self._release(list(self._unread))
                self.is_active = False

    def wait_for(self, params: Iterable[torch.Tensor]) -> None:
        """Wait until the job may read and write parameters. Raises EngineError if an operation has failed."""
        if not (self.is_active or self._unread):
            return
        indices = [self._index[param] for param in params if param in self._index]
        # The engine's own operations are no part of what torch.func transforms.
        with self.lock, temporarily_clear_interpreter_stack():
            self._runner.wait_for_params(indices)
            self._release(indices)

    def finish(self) -> None:
        """Wait until all late operations have ended; from now on the job may read and write all parameters."""
        if not (self.is_active or self._unread):
            return
        with self.lock:
            try:
                self.finish_updates()
            finally:
                self._release(list(self._unread))

    def finish_updates(self) -> None:
        """Wait until all late operations have ended. Unread parameters stay so."""
        if not self.is_active:
            return
        with self.lock, temporarily_clear_interpreter_stack():
            try:
                self._runner.finish_step()
            finally:
                self.is_active = False

    def check_gradient(self, index: int) -> None:
        """Raise EngineError for the gradient of an unread parameter."""
        if index in self._unread:
            name = self.names.get(self._params[index], f"number {index}")
            raise EngineError(
                f"parameter {name} has a gradient, but its forward has not waited for the update before: set the "
                "gradient to None, and call optimizer.synchronize() before such forwards"
            )

    def _make_late(self, updated: Iterable[int]) -> set[int]:
        """Let uses of parameters wait from now on, and return those of which all uses do."""
        if self._gates is None or not self._runner.plan.has_late_operations:
            return set()
        late = {index for index in updated if self._may_be_late(index, self._gates)}
        # Before others are looked for that hold them: there are no new ones from here on.
        self._late_params.set(map(self._params.__getitem__, late))
        whole = [index for index in late if self._params[index] not in self._gates.sharded]
        # The engine has one view of each.
        is_shared = self._holders.find_held([self._params[index] for index in whole], views=1)
        return late.difference(itertools.compress(whole, is_shared))

    def _may_be_late(self, index: int, gates: ForwardGates) -> bool:
        """Return whether Python code that uses a parameter waits."""
        param = self._params[index]
        return gates.is_gated(param) and index not in self._never_late and self._late_params.supports(param)

    def _record_others(self) -> None:
        """Record the values of updated parameters that were not recorded, after the last update has ended."""
        record, self._record = self._record, None
        if record is not None:
            record(self._updated - self._recorded)

    def _release(self, indices: Iterable[int]) -> None:
        """Make parameters ordinary again, which are written."""
        released = self._unread.intersection(indices)
        if released and self._runner.is_late and self._record is not None:
            # The job may write them while other updates run.
            self._record(released)
            self._recorded |= released
        for index in released:
            self._late_params.clear(self._params[index])
        # At last: what an interrupt leaves out is released again.
        self._unread -= released


def locked(method: Method) -> Method:
    """Return a method of an optimizer that comes before or after all others that other threads call."""

    @wraps(method)
    def locked_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Memory that is allocated in inference mode could not be written outside of it.
        with self._pending.lock, torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return cast(Method, locked_method)


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive; None without the object."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound_method = reference()
        return None if bound_method is None else bound_method(*arguments)

    return call


# What the end of the process finishes.
_unfinished: weakref.WeakSet[PendingParams] = weakref.WeakSet()


def _finish_on_thread(pending: PendingParams) -> None:
    """Finish on another thread: the garbage collector may call this on any one, which must not wait."""
    if pending.is_active:
        threading.Thread(target=_finish_or_log, args=(pending,), name="ebbtide-finish").start()


def _finish_or_log(pending: PendingParams) -> None:
    try:
        pending.finish()
    except EngineError as error:
        log.error("ebbtide: %s", error)


def _finish_all() -> None:
    for pending in list(_unfinished):
        # A step on another thread may never end.
        if pending.lock.acquire(blocking=False):
            try:
                _finish_or_log(pending)
            finally:
                pending.lock.release()


# `atexit` calls its functions when pools of threads, which update on the CPU, have ended. This comes before.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _functions(names: Iterable[str], assigned: Iterable[str]) -> frozenset[Any]:
    """Return the functions that torch passes to `__torch_function__` for attributes and methods of tensors."""
    attributes = [getattr(torch.Tensor, name) for name in names if getattr(torch.Tensor, name, None) is not None]
    getters = [attribute if callable(attribute) else attribute.__get__ for attribute in attributes]
    return frozenset([*getters, *(getattr(torch.Tensor, name).__set__ for name in assigned)])


class LateParams:
    """Gives late parameters a class whose every use in Python waits (`wait`, `finish` for all), and makes them ordinary
    again by `clear`. Only C++ code that is not torch's own, and compiled and scripted code, do not show their arguments
    so."""

    def __init__(self, wait: Callable[[Sequence[torch.Tensor]], None], finish: Callable[[], None]) -> None:
        self._wait = wait
        self._finish = finish
        # By the class that parameters have.
        self._late_classes: dict[type, type] = {}
        self._own_classes: dict[type, type] = {}

    def supports(self, param: torch.Tensor) -> bool:
        """Return whether uses of a parameter can be noticed: not if its class handles functions of torch itself."""
        own_class = type(param)
        return own_class is torch.Tensor or (
            own_class.__torch_function__ is torch._C._disabled_torch_function_impl
            and (own_class.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or hasattr(own_class, "to_local"))
        )

    def set(self, params: Iterable[torch.Tensor]) -> None:
        """Let uses of parameters wait from now on."""
        for param in params:
            own_class = type(param)
            if own_class not in self._late_classes:
                self._add_class(own_class)
            param.__class__ = self._late_classes[own_class]

    def clear(self, param: torch.Tensor) -> None:
        own_class = self._own_classes.get(type(param))
        if own_class is not None:
            param.__class__ = own_class

    def _add_class(self, own_class: type) -> None:
        def use(late_class: type, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
            keywords = kwargs or {}
            if function in _METADATA_FUNCTIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **keywords)
            late = [value for value in tree_leaves((args, keywords)) if type(value) is late_class]
            if function in _MEMORY_FUNCTIONS:
                self._finish()
            else:
                self._wait(late)
            for param in late:
                # Also one that nobody waits for any more.
                self.clear(param)
            return function(*args, **keywords)

        def local_method(name: str) -> Callable[..., Any]:
            """Return a method of a DTensor that uses its local part, and is no function of torch."""

            def use_local(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._wait([param])
                self.clear(param)
                return getattr(own_class, name)(param, *args, **kwargs)

            return use_local

        # torch.compile must not trace it: what it waits for changes.
        namespace = {"__torch_function__": classmethod(torch._disable_dynamo(use)), "__module__": own_class.__module__}
        if hasattr(own_class, "to_local"):
            namespace |= {name: local_method(name) for name in ("to_local", "full_tensor", "redistribute")}
        late_class = types.new_class(own_class.__name__, (own_class,), exec_body=lambda body: body.update(namespace))
        self._late_classes[own_class] = late_class
        self._own_classes[late_class] = own_class


_METADATA_FUNCTIONS, _MEMORY_FUNCTIONS = _functions(_METADATA, ["grad", "requires_grad"]), _functions(_MEMORY, ["data"])
