"""Kernels of PyTorch on the stand-in: an operation on CUDA tensors runs as the CPU's,
later, on its stream.

`install` replaces the kernels of the dispatch key CUDA, below autograd: allocator,
streams, events, autograd and its threads are those of the CUDA build. A kernel gets
addresses, as on a GPU, and keeps no tensor alive: memory that is freed and used again
too early gives wrong results.
"""

import atexit
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.cuda_runtime import runtime
from tests.cuda_runtime.runtime import Bytes

# Operations whose own implementation works on the stand-in: they allocate, make views,
# copy by the runtime, or wait.
_OWN = (
    *(
        "empty",
        "as_strided",
        "view",
        "_reshape_alias",
        "set_",
        "resize_",
        "_resize",
        "record_stream",
        "unfold",
    ),
    *(
        "_local_scalar_dense",
        "is_set_to",
        "is_pinned",
        "_pin_memory",
        "copy_",
        "_to_copy",
        "alias",
        "detach",
        "lift",
    ),
    *("fill_", "zero_", "_efficientzerotensor", "new_"),
)
# Those of libraries that are not here. Compositions take their place.
_NOT_HERE = (
    *(
        "_cudnn",
        "cudnn",
        "_use_cudnn",
        "miopen",
        "_nested",
        "_sparse",
        "sparse",
        "_coalesce",
        "coalesce",
        "_indices",
    ),
    *(
        "_values",
        "_fused_sdp_choice",
        "_scaled_dot_product_flash",
        "_scaled_dot_product_efficient",
    ),
    *("_scaled_dot_product_cudnn", "_flash", "_efficient"),
)
_HALF = {torch.bfloat16, torch.float16}
_library: Any = None


class Place:
    """The memory and the geometry of a CUDA tensor, without a reference to it."""

    __slots__ = ("address", "dtype", "geometry", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self.nbytes, self.dtype = (
            storage.data_ptr(),
            storage.nbytes(),
            tensor.dtype,
        )
        self.geometry = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor:
        """Return a tensor of the host over the memory."""
        offset, size, stride = self.geometry
        if not self.nbytes:
            return torch.empty(size, dtype=self.dtype)
        return torch.empty(0, dtype=self.dtype).set_(
            host_bytes(self.address, self.nbytes).untyped_storage(),
            offset,
            size,
            stride,
        )

    def bytes(self) -> Bytes:
        """Return the range of addresses from the first to the last element."""
        offset, size, stride = self.geometry
        if not self.nbytes or 0 in size:
            return Bytes(self.address, 0)
        last = sum(
            (length - 1) * step for length, step in zip(size, stride, strict=True)
        )
        width = self.dtype.itemsize
        return Bytes(self.address + offset * width, (last + 1) * width)


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Return a tensor of bytes over memory of a device."""
    memory = (ctypes.c_char * nbytes).from_address(runtime.alias(address))
    return torch.frombuffer(memory, dtype=torch.uint8)


def install() -> int:
    """Replace the kernels of CUDA. Returns how many."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    operations = [
        op
        for op in map(_operation, torch._C._dispatch_get_all_op_names())
        if op is not None
    ]
    for op in operations:
        _library.impl(op, _Replaced(op), "CUDA", allow_override=True)
    copy = torch.library.get_kernel("aten::copy_", "CUDA")
    _library.impl(
        "copy_", _copy_with(copy), "CUDA", with_keyset=True, allow_override=True
    )
    fill = torch.library.get_kernel("aten::fill_.Scalar", "CUDA")
    _library.impl(
        "fill_.Scalar", _fill_with(fill), "CUDA", with_keyset=True, allow_override=True
    )
    _library.impl(
        "fill_.Tensor",
        _Replaced(torch.ops.aten.fill_.Tensor),
        "CUDA",
        allow_override=True,
    )
    _library.impl("zero_", lambda tensor: tensor.fill_(0), "CUDA", allow_override=True)
    # Fused attention is not here; the one by matrix products is. Convolutions are
    # torch's own. torch chooses both without its dispatcher.
    torch.backends.cudnn.enabled = False
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(False)
    runtime.install_order_sites()
    atexit.register(runtime.close)
    return len(operations)


def _operation(name: str) -> Any:
    """Return an operation whose kernel on CUDA is replaced, by its name; None for
    others."""
    if not name.startswith(
        "aten::"
    ) or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
        return None
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base != "new_zeros" and base.startswith((*_OWN, *_NOT_HERE)):
        return None
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    arguments = op._schema.arguments
    is_view = any(
        one.alias_info is not None and not one.alias_info.is_write for one in arguments
    )
    has_handle = any(str(one.type) in ("Storage", "Stream") for one in arguments)
    return None if is_view or has_handle else op


class _Replaced:
    """An operation on CUDA tensors that runs as the CPU's on the current stream."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._name = str(op)
        schema = op._schema
        self._positions = {
            one.name: number for number, one in enumerate(schema.arguments)
        }
        self._takes_tensor = [str(one.type) == "Tensor" for one in schema.arguments]
        self._written = [
            one.name
            for one in schema.arguments
            if one.alias_info is not None and one.alias_info.is_write
        ]
        self._outs = [one.name for one in schema.arguments if one.is_out]
        self._returns = len(schema.returns)
        self._draws = torch.Tag.nondeterministic_seeded in op.tags
        self._on_host = _dropout if op is torch.ops.aten.native_dropout.default else op
        # torch looks at the name of what it is given.
        self.__name__ = self.__qualname__ = self._name.replace(".", "_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # An integer that torch has wrapped for an operation of two tensors.
        args = tuple(
            torch.tensor(value) if is_tensor and type(value) is int else value
            for value, is_tensor in zip(args, self._takes_tensor, strict=False)
        )
        with torch.cuda.device(_device_of(args, kwargs)):
            return (
                self._mutate(args, kwargs)
                if self._op._schema.is_mutable
                else self._compute(args, kwargs)
            )

    def _mutate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._resize_outs(args, kwargs)
        targets = [self._argument(name, args, kwargs) for name in self._written]
        self._launch(args, kwargs, targets)
        if not self._returns:
            return None
        results = [self._argument(name, args, kwargs) for name in self._outs] or targets
        return results[0] if self._returns == 1 else tuple(results)

    def _argument(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return kwargs[name] if name in kwargs else args[self._positions[name]]

    def _launch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any
    ) -> None:
        places = tree_map_only(
            torch.Tensor, _placed, (args, self._on_host_options(kwargs))
        )
        written = [
            Place(one).bytes() for one in tree_flatten(targets)[0] if _is_on_device(one)
        ]

        def work() -> None:
            host_args, host_kwargs = tree_map_only(Place, Place.tensor, places)
            self._on_host(*host_args, **host_kwargs)

        runtime.launch(self._name, work, _ranges(places), written)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            shapes = self._op(
                *tree_map_only(torch.Tensor, _shape_of, args), **_shape_options(kwargs)
            )
        except Exception:
            # The size of the result depends on values: the host waits, as it does on a
            # GPU.
            return self._compute_now(args, kwargs)
        results = tree_map_only(torch.Tensor, _allocated, shapes)
        places, targets = tree_map_only(
            torch.Tensor, _placed, ((args, self._on_host_options(kwargs)), results)
        )

        def work() -> None:
            (host_args, host_kwargs), host_results = tree_map_only(
                Place, Place.tensor, (places, targets)
            )
            try:
                values = self._on_host(*host_args, **host_kwargs)
            except RuntimeError:
                values = self._on_host(*_in_one_type(host_args), **host_kwargs)
            for target, value in zip(
                tree_flatten(host_results)[0], tree_flatten(values)[0], strict=True
            ):
                # The CPU leaves out what is not needed, such as the means of batches in
                # an evaluation.
                if isinstance(target, torch.Tensor) and value.numel():
                    target.copy_(value)

        runtime.launch(self._name, work, _ranges(places), _ranges(targets))
        return results

    def _compute_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.cuda.current_stream().synchronize()
        places = tree_map_only(
            torch.Tensor, _placed, (args, self._on_host_options(kwargs))
        )
        host_args, host_kwargs = tree_map_only(Place, Place.tensor, places)
        return tree_map_only(
            torch.Tensor, _uploaded, self._on_host(*host_args, **host_kwargs)
        )

    def _on_host_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = _replace_options(kwargs, "cpu")
        if self._draws:
            options["generator"] = _generator_of_launch(kwargs.get("generator"))
        return options

    def _resize_outs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give `out` arguments the shape of the result."""
        if not self._outs:
            return
        shape_kwargs = _shape_options(kwargs)
        empty = {
            name: torch.empty(0, dtype=kwargs[name].dtype, device="meta")
            for name in self._outs
        }
        try:
            shapes = self._op(
                *tree_map_only(torch.Tensor, _shape_of, args),
                **{**shape_kwargs, **empty},
            )
        except Exception:
            return
        for name, shape in zip(self._outs, tree_flatten(shapes)[0], strict=False):
            if kwargs[name].shape != shape.shape:
                kwargs[name].resize_(shape.shape)


def _in_one_type(args: Any) -> Any:
    """Return arguments in half precision alone: the CPU has means and deviations in it
    that CUDA has in fp32."""
    halves = {
        one.dtype for one in tree_flatten(args)[0] if isinstance(one, torch.Tensor)
    } & _HALF
    half = halves.pop() if halves else torch.float32
    return tree_map_only(
        torch.Tensor,
        lambda one: one.to(half) if one.dtype == torch.float32 else one,
        args,
    )


def _generator_of_launch(generator: torch.Generator | None) -> torch.Generator:
    """Return a generator of the host for a kernel, by the state of the device's at the
    launch, and advance that."""
    own = generator or torch.cuda.default_generators[torch.cuda.current_device()]
    offset = own.get_offset()
    own.set_offset(offset + 4)
    return torch.Generator().manual_seed(hash((own.initial_seed(), offset)))


def _dropout(
    values: torch.Tensor,
    rate: float,
    is_training: bool | None,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `native_dropout`, which takes no generator."""
    mask = torch.ones(values.shape, dtype=torch.bool)
    if is_training is False:
        return values, mask
    mask.bernoulli_(1 - rate, generator=generator)
    return values * mask / (1 - rate), mask


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in tree_flatten((args, kwargs))[0]:
        if _is_on_device(value):
            device: torch.device = value.device
            return device
        if isinstance(value, torch.device) and value.type == "cuda":
            return value
    return torch.device("cuda", torch.cuda.current_device())


def _placed(tensor: torch.Tensor) -> Any:
    # What the host has is read when a kernel is launched.
    return Place(tensor) if tensor.is_cuda else tensor.clone()


def _ranges(places: Any) -> list[Bytes]:
    return [one.bytes() for one in tree_flatten(places)[0] if isinstance(one, Place)]


def _replace_options(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    own = torch.device(device)
    options = {
        name: own if isinstance(value, torch.device) else value
        for name, value in kwargs.items()
    }
    return {
        name: None if isinstance(value, torch.Generator) else value
        for name, value in options.items()
    }


def _shape_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    options = _replace_options(kwargs, "meta")
    return {
        name: _shape_of(value) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
    )


def _allocated(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        shape.size(), shape.stride(), dtype=shape.dtype, device="cuda"
    )


def _uploaded(value: torch.Tensor) -> torch.Tensor:
    result = _allocated(value)
    if value.numel():
        Place(result).tensor().copy_(value)
    return result


def _copy_with(own: Any) -> Callable[..., torch.Tensor]:
    """Return `copy_`: by the runtime where it only moves bytes, else as a kernel."""

    def between(
        keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> torch.Tensor:
        """Copy between host and device by a contiguous temporary on the host's side, as
        torch does."""
        if not target.is_cuda:
            host = torch.empty(source.shape, dtype=source.dtype)
            own.call_boxed(keys, host, source.contiguous(), False)
            return target.copy_(host)
        host = torch.empty(target.shape, dtype=target.dtype).copy_(source)
        if target.is_contiguous():
            own.call_boxed(keys, target, host, non_blocking)
            return target
        uploaded = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        own.call_boxed(keys, uploaded, host, False)
        return target.copy_(uploaded)

    def copy(
        keys: Any,
        target: torch.Tensor,
        source: torch.Tensor,
        non_blocking: bool = False,
    ) -> torch.Tensor:
        is_within = target.is_cuda and source.is_cuda
        same_type = target.dtype == source.dtype and target.shape == source.shape
        is_plain = same_type and target.is_contiguous() and source.is_contiguous()
        has_same_order = same_type and target.stride() == source.stride()
        if is_plain or (has_same_order and not is_within):
            own.call_boxed(keys, target, source, non_blocking)
            return target
        if not is_within:
            return between(keys, target, source, non_blocking)
        to, of = Place(target), Place(source)
        runtime.launch(
            "copy_", lambda: to.tensor().copy_(of.tensor()), [of.bytes()], [to.bytes()]
        )
        return target

    return copy


def _fill_with(own: Any) -> Callable[..., torch.Tensor]:
    def fill(keys: Any, target: torch.Tensor, value: Any) -> torch.Tensor:
        if target.is_contiguous() and target.dtype not in (
            torch.bfloat16,
            torch.float16,
        ):
            own.call_boxed(keys, target, value)
            return target
        to = Place(target)
        runtime.launch("fill_", lambda: to.tensor().fill_(value), [], [to.bytes()])
        return target

    return fill
