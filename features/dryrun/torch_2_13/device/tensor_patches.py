"""Replaces methods of torch.Tensor and torch.nn.Module that do not work with fake
tensors."""

import copyreg
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import _builtins
from torch.optim import optimizer as torch_optimizers
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide.features.dryrun.memory.call_stacks import CallStacks
from ebbtide.features.dryrun.torch_2_13.device.fake_cuda import HostGenerator
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import ShadowValues
from ebbtide.features.dryrun.torch_2_13.operations.storages import FollowedStorages
from ebbtide.profiler.agent.patches import Patches

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
# No process has memory at these addresses, so that code which uses one fails at once.
_FAKE_ADDRESSES = 1 << 60
# Attributes that make a tensor a fake one; all others are the job's own.
FAKE_ATTRIBUTES = frozenset(vars(FakeTensor).get("__annotations__", ())) | {"_is_param"}


class _LegacyType(type):
    """A type that makes tensors of a data type on the device, and that such tensors are
    instances of."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*args, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dtype == cls.dtype
            and value.device.type == "cuda"
        )


def patch_legacy_types(patches: Patches) -> None:
    """Replace the types, and let `Tensor.type` convert to them, until
    `patches.undo()`."""
    for name, dtype in _DTYPES.items():
        patches.set(
            torch.cuda,
            name,
            _LegacyType(name, (), {"dtype": dtype, "__module__": "torch.cuda"}),
        )
    convert = torch.Tensor.type

    def type_of(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(torch.cuda, dtype.removeprefix("torch.cuda."), dtype)
        if isinstance(dtype, _LegacyType):
            return tensor.to("cuda", dtype.dtype)
        return convert(tensor, dtype, *args, **kwargs)

    patches.set(torch.Tensor, "type", type_of)


def become(tensor: Any, content: Any) -> None:
    """Give a tensor the content and the class of another one; its identity and its own
    attributes stay."""
    attributes = {
        key: value
        for key, value in tensor.__dict__.items()
        if key not in FAKE_ATTRIBUTES
    }
    tensor.__class__, content.__class__ = content.__class__, tensor.__class__
    tensor.__dict__, content.__dict__ = content.__dict__, tensor.__dict__
    for name in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]
        before = getattr(tensor, name)
        setattr(tensor, name, getattr(content, name))
        setattr(content, name, before)
    torch._C._swap_tensor_impl(tensor, content)
    tensor.__dict__.update(attributes)


def patch_tensors(
    patches: Patches,
    storages: FollowedStorages,
    stacks: CallStacks,
    values: ShadowValues,
) -> None:
    """Replace the methods until `patches.undo()`."""
    _patch_content(patches)
    _patch_values(patches, values)
    _patch_constructors(patches, values)
    _patch_random(patches, values)
    _patch_subclasses(patches)
    _patch_addresses(patches)
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        storages.resize(storage, stacks.current())
        return result

    patches.set(torch.UntypedStorage, "resize_", resize_storage)
    for owner in (torch_optimizers, _foreach_utils):
        patches.set(
            owner,
            "_foreach_supported_types",
            [*owner._foreach_supported_types, FakeTensor],
        )


def _patch_content(patches: Patches) -> None:
    """Let tensors get the content of others, which may be fake."""
    data = torch._C.TensorBase.data

    def set_data(tensor: Any, value: Any) -> None:
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            # Keeps a gradient of another size, as DeepSpeed has it while it releases
            # the parameter.
            data.__set__(tensor, value)
            tensor.fake_device = value.fake_device
        elif isinstance(tensor, FakeTensor) or isinstance(value, FakeTensor):
            _replace_content(tensor, value)
        else:
            data.__set__(tensor, value)

    patches.set(torch.Tensor, "data", property(data.__get__, set_data))
    patches.set(torch.nn.Module, "_apply", _apply)
    swap = torch.utils.swap_tensors

    def swap_tensors(one: Any, other: Any) -> None:
        """Swap two tensors; torch refuses fake ones, to which the mode has weak
        references."""
        (become if isinstance(one, FakeTensor) else swap)(one, other)

    patches.set(torch.utils, "swap_tensors", swap_tensors)


def _patch_values(patches: Patches, values: ShadowValues) -> None:
    """Let values of fake tensors be read as a whole."""
    original_format = torch.Tensor.__format__

    def format_tensor(tensor: Any, specification: str) -> Any:
        """Format a fake scalar by its value, as torch does with a real one."""
        if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
            return format(tensor.item(), specification)
        return original_format(tensor, specification)

    patches.set(torch.Tensor, "__format__", format_tensor)
    original_numpy = torch.Tensor.numpy

    def convert_to_numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the values of a fake tensor on the host, or placeholders."""
        if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
            tensor = values.array_of(tensor)
        return original_numpy(tensor, *args, **kwargs)

    patches.set(torch.Tensor, "numpy", convert_to_numpy)
    # It would read each element on its own; torch copies the tensor to the host as a
    # whole.
    patches.set(
        FakeTensor, "tolist", lambda tensor: values.array_of(tensor.cpu()).tolist()
    )


def _patch_constructors(patches: Patches, values: ShadowValues) -> None:
    """Let tensors be made from lists of fake ones, whose values torch reads below what
    the mode sees."""

    def values_in(data: Any) -> Any:
        if isinstance(data, FakeTensor):
            return values.array_of(data).tolist() if data.dim() else data.item()
        return type(data)(map(values_in, data)) if type(data) in (list, tuple) else data

    for name in ("tensor", "as_tensor"):
        original = getattr(torch, name)

        def make(data: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            return original(
                data if isinstance(data, torch.Tensor) else values_in(data),
                *args,
                **kwargs,
            )

        patches.set(torch, name, make)
    new = FakeTensor.__new__

    def new_parameter(kind: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Let libraries make a parameter by the type of another one, which is that of
        fake tensors."""
        if isinstance(first, torch.Tensor) and kwargs.keys() <= {"requires_grad"}:
            return torch.nn.Parameter(first, **kwargs)
        return new(kind, first, *args, **kwargs)

    patches.set(FakeTensor, "__new__", staticmethod(new_parameter))
    # TorchScript knows functions by their address.
    names = {
        id(getattr(torch, name)): f"aten::{name}" for name in ("tensor", "as_tensor")
    }
    patches.set(
        _builtins, "_builtin_table", {**_builtins._get_builtin_table(), **names}
    )


def _patch_random(patches: Patches, values: ShadowValues) -> None:
    """Let states of generators be fake, and truncated distributions end, until
    `patches.undo()`."""

    def accept(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*arguments: Any) -> Any:
            # None: not known, and the generator goes on as it was
            state = values.of(arguments[-1])
            return None if state is None else original(*arguments[:-1], state)

        return set_state

    patches.set(HostGenerator, "set_state", accept(torch._C.Generator.set_state))
    for owner in (torch, torch.random):
        patches.set(owner, "set_rng_state", accept(torch.random.set_rng_state))
    truncate = torch.nn.init._no_grad_trunc_normal_

    def truncated(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        """Sample twice, where torch samples until no value is outside."""
        if type(tensor.data) in (torch.Tensor, torch.nn.Parameter):
            return truncate(tensor, mean, std, a, b, generator)
        with torch.no_grad():
            outside = (tensor.normal_(mean, std) < a) | (tensor > b)
            return tensor.copy_(
                torch.where(
                    outside, torch.empty_like(tensor).normal_(mean, std), tensor
                )
            )

    patches.set(torch.nn.init, "_no_grad_trunc_normal_", truncated)


def _patch_addresses(patches: Patches) -> None:
    """Give each fake storage an address of its own: jobs and libraries find shared
    weights by it."""
    of_storage, of_tensor = torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr

    def storage_address(storage: Any) -> int:
        return int(
            _FAKE_ADDRESSES | storage._cdata
            if storage.device.type == "meta"
            else of_storage(storage)
        )

    def tensor_address(tensor: Any) -> int:
        if not isinstance(tensor, FakeTensor):
            return int(of_tensor(tensor))
        if not tensor.numel():
            return 0
        storage = _FAKE_ADDRESSES | int(tensor.untyped_storage()._cdata)
        return storage + int(tensor.storage_offset() * tensor.element_size())

    patches.set(torch.UntypedStorage, "data_ptr", storage_address)
    patches.set(torch.Tensor, "data_ptr", tensor_address)


@cache
def _fake_class(kind: Any) -> Any:
    """Return the class of fake tensors that are instances of a subclass of tensors,
    such as quantized parameters."""
    return (
        kind
        if issubclass(kind, FakeTensor)
        else type(kind.__name__, (kind, FakeTensor), {})
    )


def _patch_subclasses(patches: Patches) -> None:
    """Let a tensor of a subclass be made of a fake one, until `patches.undo()`."""
    original = torch.Tensor._make_subclass

    def make(kind: Any, data: Any, require_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor) or issubclass(FakeTensor, kind):
            return original(kind, data, require_grad, **options)
        return _as_subclass(kind, data).requires_grad_(require_grad)

    patches.set(torch.Tensor, "_make_subclass", staticmethod(make))


def _as_subclass(kind: Any, data: Any) -> Any:
    """Return a fake tensor of a subclass with the memory of another one."""
    made = data.detach()
    made.__class__ = _fake_class(kind)
    return made


def _replace_content(tensor: Any, value: Any) -> None:
    gradient, requires_gradient = tensor.grad, tensor.requires_grad
    kind = type(tensor)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    content = value.detach()
    if isinstance(value, FakeTensor) and kind not in (torch.Tensor, torch.nn.Parameter):
        content = _as_subclass(kind, value).requires_grad_(requires_gradient)
    elif is_parameter:
        content = torch.nn.Parameter(content, requires_grad=requires_gradient)
    elif requires_gradient:
        content.requires_grad_()
    become(tensor, content)
    tensor.grad = gradient


def _replace_parameter(module: Any, key: str, parameter: Any, applied: Any) -> None:
    if is_traceable_wrapper_subclass(applied):
        become(parameter, torch.nn.Parameter(applied, parameter.requires_grad))
    elif applied.device.type == "meta":
        # A tensor without memory cannot be the data of another one.
        replacement = torch.nn.Parameter(applied, parameter.requires_grad)
        module._parameters[key] = replacement
    else:
        parameter.data = applied


def _apply(self: Any, function: Any, recurse: bool = True) -> Any:
    """Apply a function to the parameters and buffers of a module, as
    `torch.nn.Module._apply` does."""
    if recurse:
        for child in self.children():
            child._apply(function)
    for key, parameter in self._parameters.items():
        if parameter is None:
            continue
        gradient = parameter.grad
        with torch.no_grad():
            applied = function(parameter)
            if applied is not parameter:
                parameter.grad = None
                _replace_parameter(self, key, parameter, applied)
            if gradient is not None:
                parameter.grad = function(gradient).requires_grad_(
                    gradient.requires_grad
                )
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = function(buffer)
    return self
