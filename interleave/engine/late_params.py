"""Parameters that wait for their update as soon as anything uses them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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


def _functions(names: Iterable[str], assigned: Iterable[str]) -> frozenset[Any]:
    """Return the functions that torch passes to `__torch_function__` for attributes and methods of tensors."""
    attributes = [getattr(torch.Tensor, name) for name in names if getattr(torch.Tensor, name, None) is not None]
    getters = [attribute if callable(attribute) else attribute.__get__ for attribute in attributes]
    return frozenset([*getters, *(getattr(torch.Tensor, name).__set__ for name in assigned)])


class LateParams:
    """Gives late parameters a class whose every use in Python waits, as an argument of any function of torch.

    Only functions of C++ code that is not torch's own, and compiled and scripted code, do not show their arguments so.

    Args:
        wait: Waits until parameters are written, and makes them ordinary again by `clear`.
        finish: Does so for all parameters.
    """

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
        """Make a parameter ordinary again."""
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
