"""Runs each operation of the job: on fake tensors where the device takes part, for real
elsewhere."""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.memory.call_stacks import CallStacks
from ebbtide.features.dryrun.sink import Charge, Sink
from ebbtide.features.dryrun.torch_2_13.device.attention import WHOLE_ON_DEVICE
from ebbtide.features.dryrun.torch_2_13.device.collectives import (
    COLLECTIVE_NAMESPACES,
    Collectives,
)
from ebbtide.features.dryrun.torch_2_13.device.known_calls import KnownCalls
from ebbtide.features.dryrun.torch_2_13.device.unknown_shapes import UnknownShapes
from ebbtide.features.dryrun.torch_2_13.operations.compiled_code import CompiledCode
from ebbtide.features.dryrun.torch_2_13.operations.kernel_work import charge_of
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import (
    MAX_ELEMENTS,
    ShadowValues,
    tensors_in,
)
from ebbtide.features.dryrun.torch_2_13.operations.sparse_tensors import SparseTensors
from ebbtide.features.dryrun.torch_2_13.operations.storages import FollowedStorages
from ebbtide.features.dryrun.torch_2_13.operations.workspaces import KernelWorkspaces
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.profiler.agent.patches import wrapper

_aten = torch.ops.aten
_FACTORIES = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.randn.default,
    }
)
_attention = _aten.scaled_dot_product_attention.default
_is_pinned = _aten.is_pinned.default
_device_of = torch.ops.prim.device.default
_COPIES = frozenset({_aten._to_copy.default, _aten.copy_.default})
_READS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default})
# The sum of two gradients of a tensor, and gradients of operations that read at
# indices.
_WRITES = frozenset(
    {
        _aten.add.Tensor,
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter_add.default,
        _aten.index_put.default,
        _aten.index_add.default,
    }
)
# References to a storage that nothing but the operation's first argument uses: of the
# tensor, and of its Python object.
_OWN_REFERENCES = 2
# References to the argument that is in no other hands than autograd's.
_OWN_TENSOR_REFERENCES = 4


@cache
def _is_composite(func: Any) -> bool:
    if func in WHOLE_ON_DEVICE:
        return False
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        )
    )


def _dispatches_itself(kind: Any) -> bool:
    """Return whether a subclass of tensors runs operations itself, and is no fake
    tensor."""
    dispatch = torch.Tensor.__torch_dispatch__
    return not issubclass(kind, FakeTensor) and kind.__torch_dispatch__ is not dispatch


def _is_on_device(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _name_device(kwargs: dict[str, Any]) -> bool:
    """Return whether an operation names the device to make a tensor on, and give it
    the number of the current one if it has none."""
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type != "cuda":
        return False
    if device.index is None:
        kwargs["device"] = torch.device("cuda", torch.cuda.current_device())
    elif device.index >= torch.cuda.device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return True


def _device_index(args: Iterable[Any], kwargs: dict[str, Any]) -> int | None:
    """Return the number of the device that an operation runs on: the one that it names,
    else that of its first tensor; None: the host."""
    named = kwargs.get("device")
    if named is not None:
        device = torch.device(named)
        return device.index if device.type == "cuda" else _first_index(args)
    return _first_index(args)


def _first_index(args: Iterable[Any]) -> int | None:
    for tensor in tensors_in(args):
        if _is_on_device(tensor):
            return int(tensor.fake_device.index)
    return None


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.is_mutable and func._schema.name.endswith("_"))


# The modes of this process, which pickled tensors name.
_modes: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _mode_of(number: int) -> Any:
    return _modes[number]


class HostlessFakeMode(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors that never touch a device, though CUDA looks available.

    Copies of a tensor, which copy its attributes, keep its mode."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _modes[id(self)] = self

    def __deepcopy__(self, _memo: Any) -> "HostlessFakeMode":
        return self

    def __reduce__(self) -> Any:
        return _mode_of, (id(self),)

    @property
    def avoid_device_init(self) -> bool:
        return True


class FakeDeviceMode(TorchDispatchMode):  # type: ignore[misc]
    """Decides for every operation whether it runs on fake tensors, and follows the
    memory of the device.

    Tensors of the host with more than `MAX_ELEMENTS` elements are fake too: weights
    before they are moved.

    `device_attribute`: what a fake tensor keeps its device in.

    `enabled`: false while a checkpoint is loaded."""

    def __init__(
        self,
        sink: Sink,
        stacks: CallStacks,
        storages: FollowedStorages,
        workspaces: KernelWorkspaces,
        device_attribute: str,
        devices: int = 1,
    ) -> None:
        super().__init__()
        self._devices = devices
        self.fake_mode = HostlessFakeMode(
            allow_fallback_kernels=False, allow_non_fake_inputs=True
        )
        self.fake_mode.cache_enabled = False
        self._calls = KnownCalls(self.fake_mode, device_attribute)
        self.values = ShadowValues()
        self.shapes = UnknownShapes(self.fake_mode, self.values)
        self.compiled = CompiledCode(self._allocate)
        self.enabled = True
        self._sink, self._clock = sink, sink.clock
        self._stacks, self._storages, self._workspaces = stacks, storages, workspaces
        self._sparse = SparseTensors(self, storages)
        self.collectives = Collectives(sink.clock, self.values)
        # Fake tensors work in one thread at a time.
        self._lock = threading.RLock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each operation would cost time

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _device_of:
            return (
                args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
            )
        if func is _is_pinned:
            return args[0].is_pinned()
        kwargs = dict(kwargs or {})
        if not self.enabled:
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            result = self.__torch_dispatch__(
                func, types, args, {**kwargs, "pin_memory": None}
            )
            return result.pin_memory() if result.device.type == "cpu" else result
        has_fakes = any(issubclass(kind, FakeTensor) for kind in types)
        if any(map(_dispatches_itself, types)):
            return NotImplemented
        on_device = _name_device(kwargs)
        if (
            not has_fakes
            and not on_device
            and not self._is_large_factory(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        if func is _attention:
            with self:
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if _is_composite(func):
            # DTensor calls it from below autograd, which would take it apart
            with self:
                return func.decompose(*args, **kwargs)
        index = _device_index(args, kwargs) if self._devices > 1 else None
        with self._lock:
            if index is None:
                return self._run_fake(func, types, args, kwargs)
            with self._clock.on(index):
                return self._run_fake(func, types, args, kwargs)

    @wrapper
    def wrap_thread(self, run: Callable[[Any], None], thread: Any) -> None:
        """Wrap the method that runs a thread, so that operations in new threads are
        faked, too."""
        # Autograd's own threads have no stacks; the setting is one of each thread.
        with self, torch.autograd.set_multithreading_enabled(False):
            run(thread)

    def to_fake(self, tensor: Any) -> Any:
        """Return a fake tensor like a tensor."""
        return (
            tensor
            if isinstance(tensor, FakeTensor)
            else self.fake_mode.from_tensor(tensor)
        )

    def follow_kernel(self, work: KernelWork, outputs: list[Any]) -> None:
        """Charge a kernel that has run beside the mode, and follow what it made."""
        self._sink.op(Charge(work), is_in_backward())
        for tensor in outputs:
            self._storages.add(tensor.untyped_storage(), self._stacks.current())

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return a fake tensor of the host, whatever its size."""
        with self.fake_mode:
            tensor = torch.empty(shape, dtype=dtype)
        self._storages.add_on_host(tensor.untyped_storage())
        return tensor

    @staticmethod
    def _is_large_factory(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if func not in _FACTORIES or not args:
            return False
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        elements = 1
        for size in args[0]:
            elements *= size
        return elements > MAX_ELEMENTS and dtype.is_floating_point

    def _run_fake(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in _READS:
            return self._read_value(*args)
        if func.namespace == "c10d":
            return self.collectives.run(func, args, kwargs)
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        args = self.shapes.without_boolean_index(func, args)
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        if self._sparse.take(func, inputs):
            return self._sparse.run(func, types, args, kwargs)
        key = self._calls.key(func, args, kwargs, inputs)
        call = self._calls.find(key)
        result = (
            self._make_fake(func, types, args, kwargs)
            if call is None
            else call.again(inputs)
        )
        outputs = list(tensors_in((result,)))
        if call is None:
            effects = (
                charge_of(func, args, kwargs, result, inputs, outputs),
                any(map(_is_on_device, outputs)),
            )
            # Otherwise the operation gave an argument another shape.
            if key is not None and key == self._calls.key(func, args, kwargs, inputs):
                self._calls.add(key, func, result, inputs, effects)
        charge, on_device = effects if call is None else call.effects
        deferred = self.compiled.keeps_in_registers(charge, inputs)
        self.values.follow(func, args, kwargs, inputs, outputs)
        if func.namespace in COLLECTIVE_NAMESPACES:
            self.collectives.account(func, args, kwargs, outputs)
        elif not self._count_copy(func, args, kwargs, inputs, outputs):
            charge = self.compiled.charge(charge, func, args, kwargs, inputs, outputs)
            self._sink.op(charge, is_in_backward())
        self._follow_storages(func, args, outputs, deferred)
        if on_device and not deferred:
            self._workspaces.note(func, args, kwargs, result)
        # an operation in place on a real tensor, with fake arguments
        changes_real = args and _is_real(args[0]) and isinstance(result, torch.Tensor)
        return args[0] if changes_real and _is_in_place(func) else result

    def _make_fake(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operation that was not called with such arguments
        before."""
        try:
            result = self.shapes.run(func, args, kwargs)
            return (
                self.fake_mode.dispatch(func, types, args, kwargs)
                if result is None
                else result
            )
        except DataDependentOutputException as error:
            raise CannotFakeError(
                f"cannot dry-run {error.func}: it depends on values"
            ) from error
        except DynamicOutputShapeException as error:
            raise CannotFakeError(
                f"cannot dry-run {error.func}: the shape of its result depends on "
                "values"
            ) from error
        except UnsupportedOperatorException as error:
            raise CannotFakeError(
                f"cannot dry-run {error.func}: it has no implementation for fake "
                "tensors; register one with "
                "torch.library.register_fake"
            ) from error

    def _read_value(self, tensor: Any, *other: Any) -> Any:
        """Return the value of a tensor, or whether it is equal to another one."""
        if tensor.device.type == "cuda" or other:
            self._clock.run_copy("d2h", tensor.element_size())
        if other:
            return self.values.are_equal(tensor, *other)
        return self.values.value_of(tensor)

    def _count_copy(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]
    ) -> bool:
        """Return whether an operation is a copy between host and device, and count
        it."""
        if func not in _COPIES:
            return False
        source = inputs[0] if func is _aten._to_copy.default else inputs[1]
        target = outputs[0]
        kinds = source.device.type, target.device.type
        blocking = not (
            kwargs.get("non_blocking")
            or (func is _aten.copy_.default and len(args) > 2 and args[2])
        )
        # Data types are converted on the host, in copies to the device into a pageable
        # buffer.
        if kinds == ("cpu", "cuda"):
            same_dtype = source.dtype == target.dtype
            size = target.numel() * target.element_size()
            pinned = same_dtype and source.is_pinned()
            self._clock.run_copy("h2d", size, pinned, blocking)
        elif kinds == ("cuda", "cpu"):
            size = target.numel() * source.element_size()
            self._clock.run_copy("d2h", size, target.is_pinned(), blocking)
        elif kinds == ("cuda", "cuda") and source.device != target.device:
            size = target.numel() * source.element_size()
            devices = source.device.index, target.device.index
            self._clock.run_peer_copy(*devices, size)
            return True
        return bool(kinds[0] != kinds[1])

    def _allocate(self, storage: Any, device: int) -> None:
        """Follow a storage on a device."""
        with self._clock.on(device):
            self._storages.add(storage, self._stacks.current())

    def _follow_storages(
        self, func: Any, args: Any, outputs: list[Any], deferred: bool
    ) -> None:
        """Follow the storages that an operation made, or later, if they are
        deferred."""
        reused = in_place_target(func, args)
        for tensor in outputs:
            if not isinstance(tensor, FakeTensor):
                continue
            storage = tensor.untyped_storage()
            if tensor.fake_device.type != "cuda":
                self._storages.add_on_host(storage)
            elif deferred and not self._storages.has(storage):
                self.compiled.keep(tensor)
            elif not self._storages.has(storage) and (
                reused is None or not self._storages.take_over(reused, storage)
            ):
                self._storages.add(storage, self._stacks.current())


def is_in_backward() -> bool:
    """Return whether autograd's engine runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_place_target(func: Any, args: Any) -> Any:
    """Return the storage that an operation called by autograd would write in place on a
    device; None if there is none.

    Autograd treats tensors of a subclass with care, and makes a new tensor."""
    if func not in _WRITES or not is_in_backward() or not _called_by_autograd():
        return None
    target = args[0]
    storage = target.untyped_storage()
    # Gradients that the caller of the backward gave are its own.
    if func is _aten.add.Tensor and target._use_count() > _OWN_TENSOR_REFERENCES:
        return None
    if torch._C._storage_Use_Count(
        storage._cdata
    ) > _OWN_REFERENCES + 1 or not _is_dense(target):
        return None
    return storage


def _is_dense(tensor: Any) -> bool:
    return bool(
        tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def _called_by_autograd() -> bool:
    """Return whether no Python code but the dry run's own lies between autograd and the
    operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        "ebbtide.features.dryrun"
    ):
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        "torch.utils._python_dispatch"
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
