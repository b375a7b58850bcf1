"""Finds reads and writes of parameters that do not wait for the updates of the last step."""

import logging
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ebbtide

log = logging.getLogger("ebbtide")

# Operations that use only the shape and the dtype of a tensor, and functions that read its memory by themselves.
_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")
_EXPORTS = ("numpy", "__array__", "__dlpack__", "tolist", "untyped_storage", "share_memory_")
# (first address, address behind the last element)
_Addresses = tuple[int, int]


@dataclass
class UnguardedAccess:
    """A place in a job that reads or writes parameters without waiting for their updates."""

    # File and line of the innermost function outside of torch, DeepSpeed, ebbtide and the standard library.
    location: str
    operator: str  # The operation, as torch names it.
    is_write: bool  # Whether it writes the parameters.
    params: list[str]  # The names of the parameters, in the order in which they were found.

    def __str__(self) -> str:
        params = self.params[0] + (f" and {len(self.params) - 1} more" if len(self.params) > 1 else "")
        return (
            f"{self.location}: {self.operator} {'writes' if self.is_write else 'reads'} parameter {params} before its "
            "update is known to have ended: call optimizer.synchronize() first, or use the parameter in the forward of "
            "the module of `model` that has it"
        )


class ReadChecks:
    """Makes parameters NaN from the end of a step until something waits for them, and reports who uses them before."""

    def __init__(self, names: Mapping[torch.Tensor, str], lock: threading.RLock) -> None:
        self.accesses: list[UnguardedAccess] = []
        self._names = names
        self._lock = lock
        # By the index of the parameter: the parameter, its addresses and a copy of its values.
        self._hidden: dict[int, tuple[torch.Tensor, _Addresses, torch.Tensor]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the operations of this thread. Compiled functions run eagerly, since theirs would not show."""
        with torch.compiler.set_stance("force_eager"), _ExportWatch(self), _OperationWatch(self):
            yield

    def hide(self, params: Mapping[int, torch.Tensor]) -> None:
        """Hide the values of parameters, by their indices, from now on."""
        for index, param in params.items():
            addresses, copy = _addresses(param), param.data.clone()
            if addresses is not None:
                param.data.fill_(float("nan"))
                self._hidden[index] = param, addresses, copy

    def release(self, indices: Iterable[int]) -> None:
        changed = {}
        for index in sorted(self._hidden.keys() & indices):
            param, _, copy = self._hidden.pop(index)
            if not bool(param.data.isnan().all()):
                changed[index] = param
            param.data.copy_(copy)
        self._report(changed, "an operation outside of torch or this thread", is_write=True)

    def run(self, function: Callable[[], Any], operator: str, read: Sequence[Any], written: Sequence[Any] = ()) -> Any:
        """Run an operation, report the hidden parameters that it uses, and show their values meanwhile; those of
        parameters that it writes stay shown. Other objects than tensors have no effect."""
        if not self._hidden:
            return function()
        with self._lock:
            written_params, read_params = self._used(written), self._used(read)
            self._report(written_params, operator, is_write=True)
            self._report(read_params, operator, is_write=False)
            self.release({*written_params, *read_params})
            try:
                return function()
            finally:
                self.hide({index: param for index, param in read_params.items() if index not in written_params})

    def show(self, operator: str, tensors: Sequence[Any]) -> None:
        """Report the hidden parameters that a function reads, and show their values from now on."""
        with self._lock:
            used = self._used(tensors)
            self._report(used, operator, is_write=False)
            self.release(used)

    def _used(self, tensors: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return the hidden parameters whose memory overlaps that of tensors, by their indices."""
        used = [addresses for tensor in tensors if (addresses := _addresses(tensor)) is not None]
        return {
            index: param
            for index, (param, (begin, end), _) in self._hidden.items()
            if any(begin < used_end and used_begin < end for used_begin, used_end in used)
        }

    def _report(self, params: Mapping[int, torch.Tensor], operator: str, is_write: bool) -> None:
        if not params:
            return
        names = [self._names.get(param, f"number {index}") for index, param in sorted(params.items())]
        location = _user_line()
        for access in self.accesses:
            if (access.location, access.operator, access.is_write) == (location, operator, is_write):
                access.params = list(dict.fromkeys(access.params + names))
                return
        access = UnguardedAccess(location, operator, is_write, names)
        self.accesses.append(access)
        log.warning("ebbtide: %s", access)


class _OperationWatch(TorchDispatchMode):  # type: ignore[misc]
    """Shows operations on tensors to ReadChecks."""

    def __init__(self, checks: ReadChecks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        read, written = _used_arguments(function, args, keywords)
        return self._checks.run(lambda: function(*args, **keywords), str(function), read, written)


class _ExportWatch(TorchFunctionMode):  # type: ignore[misc]
    """Shows functions to ReadChecks that read memory without an operation of torch."""

    def __init__(self, checks: ReadChecks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _EXPORTS:
            # Their result may share memory with the parameter.
            self._checks.show(f"Tensor.{name}", args[:1])
        return function(*args, **(kwargs or {}))


def _used_arguments(function: Any, args: Any, keywords: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what an operation reads, and what it writes."""
    schema = function._schema
    if schema.name.removeprefix("aten::").startswith(_SHAPE_ONLY):
        return [], []
    inputs = [(argument, value) for argument, value in zip(schema.arguments, args, strict=False)]
    inputs += [(argument, keywords[argument.name]) for argument in schema.arguments if argument.name in keywords]
    read = tree_leaves([value for argument, value in inputs if not argument.is_write])
    written = tree_leaves([value for argument, value in inputs if argument.is_write])
    is_view = not written and any(result.alias_info is not None for result in schema.returns)
    # Views read nothing.
    return [] if is_view else read, written


def _addresses(tensor: Any) -> _Addresses | None:
    """Return the range of addresses of a tensor's elements; None if it has none."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        begin = tensor.data_ptr()
    except RuntimeError:
        # A tensor without memory, as a placeholder of a gradient.
        return None
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (begin, begin + length * tensor.element_size()) if begin else None


def _user_line() -> str:
    """Return file and line of the innermost function outside of torch, DeepSpeed, ebbtide and the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_user(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of Python"


@cache
def _is_of_user(file: str) -> bool:
    libraries = [torch, ebbtide, *filter(None, [sys.modules.get("deepspeed")])]
    if file.startswith(("<", *_folders(*(path for library in libraries for path in library.__path__)))):
        return False
    installed = _folders(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return file.startswith(installed) or not file.startswith(_folders(sysconfig.get_path("stdlib")))


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(str(Path(path)) + "/" for path in paths)
