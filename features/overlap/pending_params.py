"""Parameters that a step may still write after it has returned: waits for them, and
detects gradients of old values."""

import itertools
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves

from ebbtide.features.overlap.gates import ForwardGates
from ebbtide.features.overlap.holders import ReferenceCounts
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.interleave.engine.params.step_calls import StepCalls, StepHooks, weak_call

# Attributes and methods of a tensor that use none of its elements.
_METADATA = (
    *(
        "shape",
        "device",
        "dtype",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
    ),
    *(
        "is_quantized",
        "is_mkldnn",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "retains_grad",
        "output_nr",
    ),
    *(
        "_version",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "size",
        "stride",
        "dim",
        "numel",
        "nelement",
    ),
    *(
        "element_size",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "__len__",
    ),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
)
# Those that give access to the memory: writes through them count no version of the
# tensor.
_MEMORY = (
    "data",
    "data_ptr",
    "untyped_storage",
    "storage",
    "numpy",
    "__array__",
    "__dlpack__",
    "share_memory_",
)


class PendingParams(StepHooks):
    """The parameters that the last step has updated.

    Each is unread until something has waited for it: gates of its model and LateParams
    do, and a gradient of an unread parameter is an error, since it would be a gradient
    of old values.
    """

    def __init__(self, calls: StepCalls, model: torch.nn.Module) -> None:
        self._calls = calls
        self._runner = calls.runner
        self._params: Sequence[torch.Tensor] = ()
        # The parameters that a step waits for.
        self._never_late: Container[int] = ()
        # The index of each parameter, which the forward of every module looks up.
        self._index: dict[torch.Tensor, int] = {}
        self._unread: set[int] = set()
        # Parameters of the last step that uses in Python wait for.
        self._late: set[int] = set()
        self._holders = ReferenceCounts()
        # Models, and the classes of late parameters, must not keep this object alive.
        wait, finish = weak_call(self.wait_for), weak_call(calls.finish)
        self._late_params = LateParams(wait, finish)
        self._gates = ForwardGates(model, wait, finish)

    @property
    def is_pending(self) -> bool:  # type: ignore[override]
        return bool(self._unread)

    def params_set(
        self, params: Sequence[torch.Tensor], whole: Mapping[int, int]
    ) -> None:
        self._params, self._never_late = params, whole
        self._index = {param: number for number, param in enumerate(params)}

    def gradient_ready(self, index: int) -> None:
        if index in self._unread:
            name = self._gates.names.get(self._params[index], f"number {index}")
            raise EngineError(
                f"parameter {name} has a gradient, but its forward has not waited for "
                "the update before: set the "
                "gradient to None, and call optimizer.synchronize() before such "
                "forwards"
            )

    def gradients_in(self) -> None:
        for index in self._unread:
            gradient = self._params[index].grad
            # Others are left from before, or belong to parameters that this iteration
            # has not used.
            if gradient is not None and (
                gradient.layout != torch.strided or bool(local_shard(gradient).any())
            ):
                self.gradient_ready(index)
        self.ended()
        self._gates.learn_calls()

    def decided(self, updated: Sequence[int]) -> None:
        self._unread = set(updated)
        self._late = self._make_late(updated)

    def returning(self) -> None:
        others = self._unread - self._late
        self._runner.wait_for_params(others)
        self._release(others)

    def ended(self) -> None:
        self._release(list(self._unread))

    def closed(self) -> None:
        self._gates.remove()

    def wait_for(self, params: Iterable[torch.Tensor]) -> None:
        """Wait until the job may read and write parameters. Raises EngineError if an
        operation has failed."""
        if not (self._calls.is_active or self._unread):
            return
        indices = [self._index[param] for param in params if param in self._index]
        # The engine's own operations are no part of what torch.func transforms.
        with self._calls.lock, temporarily_clear_interpreter_stack():
            self._runner.wait_for_params(indices)
            self._release(indices)

    def _make_late(self, updated: Iterable[int]) -> set[int]:
        """Let uses of parameters wait from now on.

        Return the parameters whose uses all do.
        """
        if not self._runner.plan.has_late_operations:
            return set()
        late = {index for index in updated if self._may_be_late(index)}
        # Before others are looked for that hold them: there are no new ones from here
        # on.
        self._late_params.set(map(self._params.__getitem__, late))
        whole = [
            index for index in late if self._params[index] not in self._gates.sharded
        ]
        # The engine has one view of each.
        is_shared = self._holders.find_held(
            [self._params[index] for index in whole], views=1
        )
        return late.difference(itertools.compress(whole, is_shared))

    def _may_be_late(self, index: int) -> bool:
        """Return whether Python code that uses a parameter waits."""
        param = self._params[index]
        return (
            self._gates.is_gated(param)
            and index not in self._never_late
            and self._late_params.supports(param)
        )

    def _release(self, indices: Iterable[int]) -> None:
        """Make parameters ordinary again, which are written."""
        released = self._unread.intersection(indices)
        if released:
            self._calls.record(released)
        for index in released:
            self._late_params.clear(self._params[index])
        # At last: what an interrupt leaves out is released again.
        self._unread -= released


def pending_params(
    calls: StepCalls, model: torch.nn.Module | None
) -> PendingParams | None:
    """Return the hooks of steps with late updates, which need the model whose forward
    waits for them."""
    return None if model is None else PendingParams(calls, model)


def _functions(names: Iterable[str], assigned: Iterable[str]) -> frozenset[Any]:
    """Return the functions that torch passes to `__torch_function__` for attributes and
    methods of tensors."""
    attributes = [
        getattr(torch.Tensor, name)
        for name in names
        if getattr(torch.Tensor, name, None) is not None
    ]
    getters = [
        attribute if callable(attribute) else attribute.__get__
        for attribute in attributes
    ]
    return frozenset(
        [*getters, *(getattr(torch.Tensor, name).__set__ for name in assigned)]
    )


class LateParams:
    """Gives late parameters a class whose every use in Python waits.

    Uses call `wait`, or `finish` for all; `clear` makes the parameters ordinary again.
    Only C++ code that is not torch's own, and compiled and scripted code, do not show
    their arguments so.
    """

    def __init__(
        self, wait: Callable[[Sequence[torch.Tensor]], None], finish: Callable[[], None]
    ) -> None:
        self._wait = wait
        self._finish = finish
        # By the class that parameters have.
        self._late_classes: dict[type, type] = {}
        self._own_classes: dict[type, type] = {}

    def supports(self, param: torch.Tensor) -> bool:
        """Return whether uses of a parameter can be noticed: not if its class handles
        functions of torch itself."""
        own_class = type(param)
        return own_class is torch.Tensor or (
            own_class.__torch_function__ is torch._C._disabled_torch_function_impl
            and (
                own_class.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
                or hasattr(own_class, "to_local")
            )
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
        def use(
            late_class: type,
            function: Any,
            _: Any,
            args: Any = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            keywords = kwargs or {}
            if function in _METADATA_FUNCTIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **keywords)
            late = [
                value
                for value in tree_leaves((args, keywords))
                if type(value) is late_class
            ]
            if function in _MEMORY_FUNCTIONS:
                self._finish()
            else:
                self._wait(late)
            for param in late:
                # Also one that nobody waits for any more.
                self.clear(param)
            return function(*args, **keywords)

        def local_method(name: str) -> Callable[..., Any]:
            """Return a method of a DTensor, which is no function of torch, that uses
            its local part."""

            def use_local(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._wait([param])
                self.clear(param)
                return getattr(own_class, name)(param, *args, **kwargs)

            return use_local

        # torch.compile must not trace it: what it waits for changes.
        namespace = {
            "__torch_function__": classmethod(torch._disable_dynamo(use)),
            "__module__": own_class.__module__,
        }
        if hasattr(own_class, "to_local"):
            namespace |= {
                name: local_method(name)
                for name in ("to_local", "full_tensor", "redistribute")
            }
        late_class = types.new_class(
            own_class.__name__,
            (own_class,),
            exec_body=lambda body: body.update(namespace),
        )
        self._late_classes[own_class] = late_class
        self._own_classes[late_class] = own_class


_METADATA_FUNCTIONS, _MEMORY_FUNCTIONS = (
    _functions(_METADATA, ["grad", "requires_grad"]),
    _functions(_MEMORY, ["data"]),
)
