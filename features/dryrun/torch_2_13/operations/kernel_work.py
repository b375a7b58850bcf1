"""Work of an operation's kernel: floating-point operations, bytes, and the class that
decides its efficiency."""

import math
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ebbtide.features.dryrun.sink import Charge
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import (
    tensors_in,
    written_arguments,
)
from ebbtide.machines.kernels.efficiency import CUDNN, FLASH_2, FLASH_3
from ebbtide.machines.kernels.rates import AttentionSize, KernelWork, ProductSize
from ebbtide.machines.kernels.time_priors import WorkClass

_aten = torch.ops.aten
_MATRIX = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
     "_scaled_mm", "_addmm_activation",
     "_grouped_mm", "_scaled_grouped_mm", "_int_mm"}
)  # fmt: skip
_REDUCTIONS = frozenset(
    {"sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm",
     "amax", "amin", "aminmax",
     "max", "min", "argmax", "argmin", "any", "all", "prod", "logsumexp", "cumsum",
     "cumprod", "sort", "topk",
     "_softmax", "_log_softmax", "_softmax_backward_data",
     "_log_softmax_backward_data", "mse_loss"}
)  # fmt: skip
_INDEXED = frozenset(
    {"embedding", "index", "gather", "index_select", "take", "masked_select",
     "nonzero", "embedding_dense_backward",
     "index_put", "index_put_", "_index_put_impl_", "scatter", "scatter_",
     "scatter_add", "scatter_add_", "index_add",
     "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
     "masked_scatter", "masked_scatter_",
     "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
     "nll_loss2d_backward"}
)  # fmt: skip
# Of these in place, what is written is not read before.
_OVERWRITING = frozenset(
    {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_",
     "exponential_", "_foreach_zero_",
     "_foreach_copy_", "_foreach_fill_"}
)  # fmt: skip
_MEMSETS = frozenset(
    {
        "zero_",
        "fill_",
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
    }
)
_UNINITIALIZED = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
)
_COPIES = frozenset({"copy_", "clone", "contiguous", "_foreach_copy_"})
# Tensors and elements of a list that one kernel takes
# (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_LIST_TENSORS, _LIST_ELEMENTS = 64, 320 * 65_536
# Their arguments begin with the rows of all groups, and a matrix per group.
_GROUPED = frozenset({"_grouped_mm", "_scaled_grouped_mm"})


def charge_of(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    inputs: list[Any],
    outputs: list[Any],
) -> Charge:
    """Return the cost of an operation that is no copy between host and device."""
    tensors = [*inputs, *outputs]
    if not any(tensor.device.type == "cuda" for tensor in tensors):
        sizes = (tensor.numel() * tensor.element_size() for tensor in tensors)
        return Charge(host_bytes=0 if func.is_view else sum(sizes))
    work = kernel_work(func, args, kwargs, result, inputs, outputs)
    takes_lists = work is not None and work.work_class is WorkClass.FOREACH
    return Charge(work, len(inputs) if takes_lists else 0)


def kernel_work(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    inputs: list[Any],
    outputs: list[Any],
) -> KernelWork | None:
    """Return the work of an operation on the device; None for one without a kernel, as
    a view or `empty`."""
    name = _short_name(func)
    if func.is_view or name in _UNINITIALIZED:
        return None
    written = _written_tensors(func, args, kwargs)
    if not written and _shares_storage(inputs, outputs):
        return None
    work_class = _work_class(func)
    if kwargs.get("beta") == 0:
        inputs = inputs[1:]  # what a product is not added to is not read
    size = _traffic(name, work_class, inputs, written or outputs)
    if not size:
        return None
    flops, precision = 0, "float32"
    dimensions: ProductSize | AttentionSize | None = None
    if work_class in (
        WorkClass.MATRIX,
        WorkClass.CONVOLUTION,
        WorkClass.ATTENTION,
        WorkClass.ATTENTION_BACKWARD,
    ):
        flops = _count_flops(func, name, args, kwargs, result, inputs)
        precision = _precision(work_class, inputs[0])
        if work_class is WorkClass.MATRIX:
            results = written or outputs
            elements = sum(tensor.numel() for tensor in results)
            dimensions = ProductSize(
                elements, _smallest_dimension(inputs), _is_aligned([*inputs, *results])
            )
        elif work_class is not WorkClass.CONVOLUTION:
            dimensions = _attention_size(str(func._schema.name), inputs)
    launches = (
        _list_launches(written or outputs) if work_class is WorkClass.FOREACH else 1
    )
    return KernelWork(
        func._schema.name,
        _kind(func, name),
        work_class,
        flops,
        size,
        precision,
        dimensions,
        launches,
    )


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor on the device, each element once though it is
    expanded; 0 on the host."""
    if tensor.device.type != "cuda":
        return 0
    elements = tensor.numel()
    if elements and 0 in (strides := tensor.stride()):
        elements = math.prod(
            size for size, stride in zip(tensor.shape, strides, strict=True) if stride
        )
    return int(elements * tensor.element_size())


@cache
def _short_name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


@cache
def _kind(func: Any, name: str) -> str:
    return "memset" if name in _MEMSETS else "copy" if name in _COPIES else "compute"


@cache
def _work_class(func: Any) -> WorkClass:
    name = _short_name(func)
    if name in _MATRIX:
        return WorkClass.MATRIX
    if "attention" in name:
        return (
            WorkClass.ATTENTION_BACKWARD
            if name.endswith("backward")
            else WorkClass.ATTENTION
        )
    if "conv" in name and func._overloadpacket in flop_registry:
        return WorkClass.CONVOLUTION
    if name.startswith(
        ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")
    ):
        return WorkClass.FOREACH
    if name in _INDEXED:
        return WorkClass.INDEXED
    return (
        WorkClass.REDUCTION
        if name in _REDUCTIONS or "norm" in name
        else WorkClass.ELEMENTWISE
    )


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Any]:
    if not func._schema.is_mutable:
        return []
    positions, names = written_arguments(func)
    values = [args[position] for position in positions if position < len(args)]
    return list(
        tensors_in([*values, *(kwargs[name] for name in names if name in kwargs)])
    )


def _shares_storage(inputs: list[Any], outputs: list[Any]) -> bool:
    """Return whether every result has the memory of an argument, as `_unsafe_view`
    returns it."""
    if not inputs or not outputs:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


def _traffic(
    name: str, work_class: WorkClass, inputs: list[Any], written: list[Any]
) -> int:
    targets = {id(tensor) for tensor in written}
    writes = sum(tensor_bytes(tensor) for tensor in written)
    others = [tensor_bytes(tensor) for tensor in inputs if id(tensor) not in targets]
    in_place = any(id(tensor) in targets for tensor in inputs)
    if work_class is WorkClass.INDEXED:
        if in_place:
            touched = min(writes, sum(others))
            return sum(others) + 2 * touched
        return writes + sum(min(size, writes) for size in others)
    reads = writes if in_place and name not in _OVERWRITING else 0
    return writes + reads + sum(others)


def _count_flops(
    func: Any, name: str, args: Any, kwargs: Any, result: Any, inputs: list[Any]
) -> int:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        # The formula of a product with another type of its result, `mm.dtype`, is that
        # of `mm`.
        tensors = [value for value in args if not isinstance(value, torch.dtype)]
        options = {key: value for key, value in kwargs.items() if key != "out_dtype"}
        flops = int(formula(*tensors, **options, out_val=result))
        # Fused kernels leave out what a causal mask hides.
        return flops // 2 if _is_causal(func, args, kwargs) else flops
    matrices = [tensor for tensor in inputs if tensor.dim()]
    if name in _MATRIX and len(matrices) > 1:
        left, right = (
            matrices[0] if name in _GROUPED else matrices[-2],
            matrices[1 if name in _GROUPED else -1],
        )
        return int(2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1))
    return 0


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    position = _argument_position(func, "is_causal")
    if position is None:
        return False
    return bool(
        args[position] if position < len(args) else kwargs.get("is_causal", False)
    )


@cache
def _argument_position(func: Any, name: str) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else None


def _precision(work_class: WorkClass, tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(("float8", "int8")):
        return "float8"  # both have twice the rate of half precision
    if name in ("float16", "bfloat16"):
        return name
    operation = "conv" if work_class is WorkClass.CONVOLUTION else "matmul"
    return (
        "tf32"
        if torch._C._get_fp32_precision_getter("cuda", operation) == "tf32"
        else "float32"
    )


def _smallest_dimension(inputs: list[Any]) -> int:
    sizes = [
        size for tensor in inputs if tensor.dim() > 1 for size in tensor.shape[-2:]
    ]
    return min((size for size in sizes if size > 1), default=1)


def _is_aligned(tensors: list[Any]) -> bool:
    """Return whether rows of all matrices in half precision begin at multiples of 16
    B."""
    matrices = [
        tensor for tensor in tensors if tensor.dim() > 1 and tensor.element_size() == 2
    ]
    return not any(
        max(tensor.stride()[-2:]) % 8
        for tensor in matrices
        if min(tensor.shape[-2:]) > 1
    )


def _attention_size(name: str, inputs: list[Any]) -> AttentionSize:
    """Return the size of attention: heads before the sequence in torch's own operation,
    else after it."""
    query = next(tensor for tensor in inputs if tensor.dim() > 2)
    sequence = query.shape[-2] if "scaled_dot_product" in name else query.shape[-3]
    implementation = (
        CUDNN if "cudnn" in name else FLASH_3 if "flash_attn_3" in name else FLASH_2
    )
    return AttentionSize(sequence, query.shape[-1], implementation)


def _list_launches(tensors: list[Any]) -> int:
    elements = sum(int(tensor.numel()) for tensor in tensors)
    return max(1, -(-len(tensors) // _LIST_TENSORS), -(-elements // _LIST_ELEMENTS))
