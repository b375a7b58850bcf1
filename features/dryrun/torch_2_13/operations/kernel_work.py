"""Work of an operation's kernel: floating-point operations, bytes, and the class that
decides its efficiency."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from ebbtide.features.dryrun.sink import Charge
from ebbtide.features.dryrun.torch_2_13.operations.convolutions import (
    convolution_work,
)
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import (
    tensors_in,
    written_arguments,
)
from ebbtide.machines.kernels.efficiency import (
    CUDNN,
    EFFICIENT,
    FLASH_2,
    FLASH_3,
    AttentionSize,
    ProductSize,
)
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass

_aten = torch.ops.aten
# Parts of the names of products, torch's and others', such as `gemm_4bit`.
_PRODUCT_WORDS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
     "matmul", "gemm", "gemv", "linear"}
)  # fmt: skip
_REDUCTIONS = frozenset(
    {"sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm",
     "amax", "amin", "aminmax",
     "max", "min", "argmax", "argmin", "any", "all", "prod", "logsumexp", "cumsum",
     "cumprod", "sort", "topk",
     "_softmax", "_log_softmax", "_softmax_backward_data",
     "_log_softmax_backward_data", "mse_loss"}
)  # fmt: skip
# Parts of the names of gathers and scatters.
_INDEXED_WORDS = frozenset(
    {"embedding", "index", "gather", "scatter", "take", "put", "nonzero",
     "nll", "segment", "grid"}
)  # fmt: skip
_SELECTED = "masked_select"
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
# bitsandbytes unpacks weights for products with more rows than this, and multiplies
# them as others are (`_gemm_4bit_custom_max_m` in bitsandbytes/backends/cuda/ops.py).
_MOST_PACKED_ROWS = 1536
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
    if not any(tensor.device.type == "cuda" for tensor in (*inputs, *outputs)):
        return Charge(host_bytes=_host_bytes(func, args, kwargs, inputs, outputs))
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
    written = written_tensors(func, args, kwargs)
    if not written and _shares_storage(inputs, outputs):
        return None
    work_class = _work_class(func)
    if kwargs.get("beta") == 0:
        inputs = inputs[1:]  # what a product is not added to is not read
    size = _traffic(name, work_class, inputs, written or outputs)
    if not size:
        return None
    results = written or outputs
    product = _product_work(func, args, kwargs, result, inputs, results)
    if product.is_depthwise:
        work_class = WorkClass.DEPTHWISE
    launches = _list_launches(results) if work_class is WorkClass.FOREACH else 1
    return KernelWork(
        func._schema.name,
        _kind(func, name),
        work_class,
        product.flops,
        size,
        product.precision,
        product.size,
        launches,
        copied_bytes=product.copied_bytes,
    )


class _ProductWork(NamedTuple):
    """The work of a product, a convolution or attention, without its bytes."""

    flops: int = 0
    precision: str = "float32"
    size: ProductSize | AttentionSize | None = None
    copied_bytes: int = 0
    is_depthwise: bool = False


def _product_work(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    inputs: list[Any],
    results: list[Any],
) -> _ProductWork:
    work_class = _work_class(func)
    if work_class is WorkClass.CONVOLUTION:
        precision = _precision(work_class, inputs[0])
        output = args[0] if "backward" in func._schema.name else results[0]
        work = convolution_work(func, args, kwargs, output, precision)
        return _ProductWork(*work)
    if work_class in (WorkClass.ATTENTION, WorkClass.ATTENTION_BACKWARD):
        flops = _count_flops(func, args, kwargs, result, inputs)
        attention = _attention_size(str(func._schema.name), inputs)
        return _ProductWork(flops, _precision(work_class, inputs[0]), attention)
    if work_class is WorkClass.MATRIX:
        flops = _count_flops(func, args, kwargs, result, inputs)
        precision = _precision(work_class, inputs[0])
        size = _product_size(_short_name(func), flops, precision, inputs, results)
        unpacked = _unpacked_bytes(size, inputs, results)
        return _ProductWork(flops, precision, size, unpacked)
    return _ProductWork()


def _host_bytes(
    func: Any, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]
) -> int:
    """Return the bytes of host memory that an operation reads and writes."""
    name = _short_name(func)
    if func.is_view or name in _UNINITIALIZED:
        return 0
    written = written_tensors(func, args, kwargs)
    return _traffic(name, _work_class(func), inputs, written or outputs, _stored_bytes)


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor on the device, each element once though it is
    expanded; 0 on the host."""
    return _stored_bytes(tensor) if tensor.device.type == "cuda" else 0


def _stored_bytes(tensor: Any) -> int:
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
    if "attention" in name:
        return (
            WorkClass.ATTENTION_BACKWARD
            if name.endswith("backward")
            else WorkClass.ATTENTION
        )
    words = frozenset(name.split("_"))
    if not _PRODUCT_WORDS.isdisjoint(words):
        return WorkClass.MATRIX
    if "conv" in name and func._overloadpacket in flop_registry:
        return WorkClass.CONVOLUTION
    if name.startswith(
        ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")
    ):
        return WorkClass.FOREACH
    if name == _SELECTED or not _INDEXED_WORDS.isdisjoint(words):
        return WorkClass.INDEXED
    return (
        WorkClass.REDUCTION
        if name in _REDUCTIONS or "norm" in name
        else WorkClass.ELEMENTWISE
    )


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operation changes."""
    if not func._schema.is_mutable:
        return []
    positions, names = written_arguments(func)
    if _short_name(func).startswith("_fused_") and kwargs.get("grad_scale") is None:
        # Gradients are written where they are unscaled alone.
        gradients = _argument_position(func, "grads")
        positions = [position for position in positions if position != gradients]
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
    name: str,
    work_class: WorkClass,
    inputs: list[Any],
    written: list[Any],
    bytes_of: Callable[[Any], int] = tensor_bytes,
) -> int:
    targets = {id(tensor) for tensor in written}
    writes = sum(bytes_of(tensor) for tensor in written)
    others = [bytes_of(tensor) for tensor in inputs if id(tensor) not in targets]
    in_place = any(id(tensor) in targets for tensor in inputs)
    if work_class is WorkClass.INDEXED:
        if "embedding_bag" in name:
            # Each index reads a row; the gradient of each is added to another.
            rows = _bag_bytes(inputs)
            return writes + (2 * rows if name.endswith("backward") else rows)
        if in_place:
            touched = min(writes, sum(others))
            return sum(others) + 2 * touched
        return writes + sum(min(size, writes) for size in others)
    reads = writes if in_place and name not in _OVERWRITING else 0
    return writes + reads + sum(others)


def _bag_bytes(inputs: list[Any]) -> int:
    """Return the bytes of the indices of bags, and of a row for each."""
    sizes = [(t.numel(), t.element_size()) for t in inputs if not t.is_floating_point()]
    indices, index_bytes = max(sizes)
    row = next(tensor for tensor in inputs if tensor.dim() > 1)
    return int(indices * (row.shape[-1] * row.element_size() + index_bytes))


def _count_flops(
    func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any]
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
    name = _short_name(func)
    matrices = [tensor for tensor in inputs if tensor.dim()]
    if _work_class(func) is not WorkClass.MATRIX or len(matrices) < 2:
        return 0
    if func.namespace != "aten":
        # Rows of the first argument by weights that may be packed.
        outputs = sum(int(tensor.numel()) for tensor in tensors_in((result,)))
        return 2 * outputs * int(matrices[0].shape[-1])
    left, right = matrices[:2] if name in _GROUPED else matrices[-2:]
    return int(2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1))


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


def _product_size(
    name: str, flops: int, precision: str, inputs: list[Any], results: list[Any]
) -> ProductSize | None:
    """Return the size of a product; None for one with a vector, or of a kind that is
    not known, whose bytes take longer."""
    target = results[0]
    elements = sum(int(tensor.numel()) for tensor in results)
    if target.dim() < 2 or not elements:
        return None
    columns, inner = int(target.shape[-1]), flops / 2 / elements
    batches = target.shape[:-2].numel()
    if name in _GROUPED:
        batches = inputs[1].shape[0] if inputs[1].dim() > target.dim() else batches
    elif not any(tensor.dim() > 2 for tensor in inputs[1:]):
        batches = 1
    rows = elements / columns / batches
    smallest = min(rows, columns, inner)
    if smallest <= 1:
        return None
    alignment = _alignment_bytes([*inputs, *results], precision)
    return ProductSize(elements, smallest, inner, alignment)


def _alignment_bytes(tensors: list[Any], precision: str) -> int:
    """Return the bytes, at most 16, at multiples of which all matrices and their rows
    begin."""
    alignment = 16
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.dim() < 2 or (size > 2 and precision != "tf32"):
            continue
        steps = [
            stride
            for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
            if length > 1 and stride > 1
        ]
        alignment = math.gcd(alignment, int(tensor.storage_offset() * size))
        alignment = math.gcd(alignment, *(int(step * size) for step in steps))
    return alignment


def _unpacked_bytes(
    size: ProductSize | None, inputs: list[Any], results: list[Any]
) -> int:
    """Return the bytes that are moved to unpack the weights of a product."""
    if size is None or len(inputs) < 2 or inputs[1].dtype is not torch.uint8:
        return 0
    columns = int(results[0].shape[-1])
    if size.result_elements / columns <= _MOST_PACKED_ROWS:
        return 0
    weight = round(size.inner) * columns * results[0].element_size()
    return int(inputs[1].numel() + 2 * weight)


def _attention_size(name: str, inputs: list[Any]) -> AttentionSize:
    """Return the size of attention: heads before the sequence in torch's own operation,
    else after it."""
    query = next(tensor for tensor in inputs if tensor.dim() > 2)
    sequence = query.shape[-2] if "scaled_dot_product" in name else query.shape[-3]
    kinds = (("cudnn", CUDNN), ("flash_attn_3", FLASH_3), ("efficient", EFFICIENT))
    implementation = next((kind for word, kind in kinds if word in name), FLASH_2)
    return AttentionSize(sequence, query.shape[-1], implementation)


def _list_launches(tensors: list[Any]) -> int:
    elements = sum(int(tensor.numel()) for tensor in tensors)
    return max(1, -(-len(tensors) // _LIST_TENSORS), -(-elements // _LIST_ELEMENTS))
