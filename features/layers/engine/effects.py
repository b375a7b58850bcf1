"""Sees what a layer's forward changes beside its outputs.

To compute such a forward again would change the job.

Before and after a forward the same places are read: buffers, parameters and inputs
(versions of tensors); attributes of the layer's modules, of their classes, and of
objects that these or the inputs refer to; items of lists, dicts and sets; variables of
functions that are in them, by closure, default or global name; NumPy arrays; generators
of torch, NumPy and `random`, and both global ones; iterators. Setting an attribute to
an equal number or text is no change.

What cannot be seen: state in native code and in files, in variables of installed
packages, in objects of the standard library, torch and NumPy (but for what is listed
above), and in functions that no module, object or function in reach names. If results
depend on that, the comparison in the backward sees it.
"""

import contextlib
import functools
import pickle
import random
import sys
import sysconfig
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

_Contents = Callable[[], Sequence[Any]]
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
)
# Objects of these have no attributes that matter.
_OPAQUE = {*sys.stdlib_module_names, "torch", "numpy", "ebbtide", "triton"} - {
    "__main__"
}
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_CACHED = type(functools.cache(int))


class _Place:
    """A container, and the identities of its contents."""

    __slots__ = ("contents", "ids", "name")

    def __init__(self, name: str, contents: _Contents) -> None:
        self.name = name
        self.contents = contents
        self.ids = [*map(id, contents())]


class Watch:
    """Places that can be reached from some objects, and the states of what has one.

    Attributes:
        holds_others: Whether it may hold tensors that are no parameters or buffers,
            when the job has released them.
    """

    def __init__(
        self, name: str, roots: Iterable[Any], outer: "Watch | None" = None
    ) -> None:
        """Look for places. `outer`: a watch whose places are left out."""
        self._seen: dict[Any, Any] = {}
        self._outer = {} if outer is None else outer._seen
        self._places: list[_Place] = []
        self._states: list[tuple[str, Callable[[], Any]]] = []
        self._tensors: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._dead: list[object] = []
        self._buffers: set[int] = set()
        self.holds_others = False
        self._before: tuple[list[int], list[Any]] = [], []
        self._pending: list[tuple[str, Any]] = [(name, root) for root in roots]
        while self._pending:
            self._visit(*self._pending.pop())

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, ref in self._tensors if (tensor := ref()) is not None]

    def is_current(self) -> bool:
        """Return whether the places are still those that can be reached."""
        return not self._dead and all(
            [*map(id, place.contents())] == place.ids for place in self._places
        )

    def begin(self) -> None:
        self._before = (
            [tensor._version for tensor in self.tensors()],
            [read() for _, read in self._states],
        )

    def change(self) -> str:
        """Return what has changed since `begin`; an empty text if nothing has."""
        for place in self._places:
            if not self._is_same(place):
                return place.name
        versions, states = self._before
        for (name, ref), version in zip(self._tensors, versions, strict=False):
            tensor = ref()
            if tensor is None or tensor._version != version:
                return name
        for (name, read), state in zip(self._states, states, strict=True):
            if read() != state:
                return name
        return ""

    def _is_same(self, place: _Place) -> bool:
        contents = place.contents()
        ids = [*map(id, contents)]
        if ids == place.ids:
            return True
        same = len(ids) == len(place.ids) and all(
            new == old or _is_equal(self._seen.get(old), value)
            for new, old, value in zip(ids, place.ids, contents, strict=True)
        )
        if same:
            self._seen |= zip(ids, contents, strict=True)
            place.ids = ids
        return same

    def _add(self, name: str, contents: _Contents) -> None:
        """Watch a container and visit its contents."""
        self._places.append(_Place(name, contents))
        self._pending += [(name, value) for value in contents()]

    def _visit(self, name: str, value: Any) -> None:
        if id(value) in self._seen or id(value) in self._outer:
            return
        if isinstance(value, torch.Tensor):
            self._visit_tensor(name, value)
            return
        self._seen[id(value)] = value
        if isinstance(value, _PLAIN):
            return
        visit = next(
            (visit for kinds, visit in _VISITS if isinstance(value, kinds)),
            Watch._visit_object,
        )
        visit(self, name, value)

    def _visit_tensor(self, name: str, tensor: torch.Tensor) -> None:
        # Not held: it may be a graph's.
        self._seen[id(tensor)] = None
        self.holds_others |= (
            not isinstance(tensor, torch.nn.Parameter)
            and id(tensor) not in self._buffers
        )
        if not tensor.is_inference():
            self._tensors.append((name, weakref.ref(tensor, self._dead.append)))

    def _visit_module(self, name: str, module: torch.nn.Module) -> None:
        name = type(module).__name__
        self._places.append(
            _Place(f"an attribute of {name}", lambda: [*vars(module).values()])
        )
        self._buffers |= {*map(id, module._buffers.values())}
        # Most dicts of hooks are empty.
        filled = {
            key: one
            for key, one in vars(module).items()
            if not key.endswith("_hooks") or one
        }
        self._pending += [(f"{name}.{key}", one) for key, one in filled.items()]
        self._pending.append((name, type(module)))

    def _add_attributes(self, name: str, attributes: Any) -> None:
        """Watch a dict whose keys are names."""
        self._places.append(
            _Place(
                f"an attribute of {name}", lambda: [*attributes, *attributes.values()]
            )
        )
        self._pending += [(f"{name}.{key}", value) for key, value in attributes.items()]

    def _visit_class(self, name: str, kind: type) -> None:
        if _is_library(kind.__module__):
            return
        attributes = vars(kind)
        self._places.append(
            _Place(
                f"an attribute of the class {kind.__name__}",
                lambda: [*attributes.values()],
            )
        )
        self._pending += [
            (f"{kind.__name__}.{key}", value) for key, value in attributes.items()
        ]
        self._pending += [(name, base) for base in kind.__bases__]

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        if _is_library(function.__module__ or ""):
            return
        name = f"a variable of {function.__qualname__}"
        self._pending += [
            (name, function.__defaults__),
            (name, function.__kwdefaults__),
        ]
        self._pending += [(name, cell) for cell in function.__closure__ or ()]
        names = [*dict.fromkeys(_names(function.__code__))]
        self._visit_globals(function.__globals__, names)

    def _visit_globals(self, variables: dict[str, Any], names: Sequence[str]) -> None:
        """Watch global variables with some names, also of the modules among them."""
        key = "globals", id(variables)
        own = [name for name in names if (*key, name) not in self._seen]
        self._seen |= {(*key, name): variables for name in own}
        data = [
            name
            for name in own
            if not isinstance(
                variables.get(name), (type, types.FunctionType, types.ModuleType)
            )
        ]
        self._places.append(
            _Place(
                f"one of the variables {', '.join(data)}",
                lambda: [variables.get(n) for n in data],
            )
        )
        for name in own:
            value = variables.get(name)
            if not isinstance(value, types.ModuleType):
                self._pending.append((f"the variable {name}", value))
            elif not _is_library(value.__name__):
                self._visit_globals(vars(value), names)

    def _visit_method(self, name: str, method: types.MethodType) -> None:
        self._pending += [(name, method.__self__), (name, method.__func__)]

    def _visit_builtin(self, name: str, function: types.BuiltinFunctionType) -> None:
        if not isinstance(function.__self__, types.ModuleType):
            self._pending.append((name, function.__self__))

    def _visit_wrapper(self, name: str, wrapper: Any) -> None:
        parts = ("__func__", "__wrapped__", "fget", "fset", "func", "args", "keywords")
        self._pending += [(name, getattr(wrapper, part, None)) for part in parts]

    def _visit_cell(self, name: str, cell: types.CellType) -> None:
        self._add(name, lambda: _cell_contents(cell))

    def _visit_dict(self, name: str, values: dict[Any, Any]) -> None:
        self._add(name, lambda: [*values, *values.values()])

    def _visit_list(self, name: str, values: Any) -> None:
        self._add(name, lambda: [*values])

    def _visit_tuple(self, name: str, values: Any) -> None:
        self._pending += [(name, value) for value in values]

    def _add_state(self, name: str, read: Callable[[], Any]) -> None:
        self._states.append((name, read))

    def _visit_object(self, name: str, value: Any) -> None:
        kind = type(value)
        if hasattr(value, "__next__"):
            self._add_state(name, lambda: _iterator_state(value))
        if _is_opaque(kind.__module__):
            original = (
                getattr(value, "original", None)
                if kind.__module__.startswith("ebbtide")
                else None
            )
            self._pending.append((name, original))
            return
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._add_attributes(kind.__name__, attributes)
        slots = [slot for base in kind.__mro__ for slot in _slots(base)]
        if slots:
            self._add(
                f"an attribute of {kind.__name__}",
                lambda: [getattr(value, slot, None) for slot in slots],
            )
        self._pending.append((name, kind))


def _visit_state(read: Callable[[Any], Any]) -> Callable[[Watch, str, Any], None]:
    return lambda watch, name, value: watch._add_state(name, lambda: read(value))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function, or a function in it, reads or writes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _cell_contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [*slots]


@functools.cache
def _is_library(module_name: str) -> bool:
    """Return whether a module belongs to a library, which is not looked into: Python,
    an installed package, or ebbtide."""
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return _is_opaque(module_name) or file.startswith(_LIBRARIES)


def _is_opaque(module_name: str) -> bool:
    return module_name.partition(".")[0] in _OPAQUE


def _is_equal(old: Any, new: Any) -> bool:
    return isinstance(old, _PLAIN) and type(old) is type(new) and bool(old == new)


def _array_state(array: np.ndarray[Any, Any]) -> bytes:
    return blake2b(array.tobytes()).digest()


def _numpy_state(generator: Any) -> Any:
    # State of a RandomState, of a Generator, or of a BitGenerator.
    bits = getattr(generator, "_bit_generator", None) or getattr(
        generator, "bit_generator", generator
    )
    return repr(pickle.dumps(bits.state))


def _iterator_state(iterator: Any) -> Any:
    """Return the state of an iterator; a new object where it shows none."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        return repr(iterator.__reduce__())
    return object()


def _torch_state(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())


def global_states() -> list[Any]:
    """Return the states of the global generators of `random` and NumPy."""
    # Array of the state, its position, and a number that was drawn ahead.
    _, keys, *rest = np.random.get_state(legacy=True)
    return [random.getstate(), (np.asarray(keys).tobytes(), *rest)]


_VISITS: list[tuple[Any, Callable[[Watch, str, Any], None]]] = [
    (torch.nn.Module, Watch._visit_module),
    (types.FunctionType, Watch._visit_function),
    (types.MethodType, Watch._visit_method),
    (types.BuiltinFunctionType, Watch._visit_builtin),
    (type, Watch._visit_class),
    (types.CellType, Watch._visit_cell),
    (
        (staticmethod, classmethod, property, functools.partial, _CACHED),
        Watch._visit_wrapper,
    ),
    ((tuple, frozenset), Watch._visit_tuple),
    (dict, Watch._visit_dict),
    ((list, set, deque), Watch._visit_list),
    (torch.Generator, _visit_state(_torch_state)),
    (random.Random, _visit_state(random.Random.getstate)),
    (bytearray, _visit_state(bytes)),
    (np.ndarray, _visit_state(_array_state)),
    (
        (np.random.Generator, np.random.RandomState, np.random.BitGenerator),
        _visit_state(_numpy_state),
    ),
]
