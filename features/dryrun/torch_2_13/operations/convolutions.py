"""Sizes of convolutions as products of matrices, and workspaces of cuDNN's.

torch takes the first algorithm of cuDNN's heuristics whose workspace it gets
(aten/src/ATen/native/cudnn/Conv_v8.cpp). Tensor cores read channels-last tensors: cuDNN
copies others (the "automatic transpose operations" of NVIDIA's guide to convolutional
layers).
"""

import math
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from ebbtide.machines.kernels.efficiency import ProductSize
from ebbtide.profiler.agent.patches import Patches

_aten = torch.ops.aten
CONVOLUTIONS = frozenset({_aten.convolution, _aten.convolution_backward})
_PLAIN = torch.contiguous_format
_TF32_CAPABILITY = (8, 0)  # From Ampere on, tensor cores take fp32 as tf32.
# Winograd's algorithm computes tiles of 2 x 2 results of a filter of 3 x 3 with 16
# multiplications instead of 36 (Lavin and Gray 2016, "Fast Algorithms for Convolutional
# Neural Networks"); cuDNN has it for both gradients, too. On V100 the best kernels
# reach 0.93 of the peak with these, at most 2.13 times the speed of cuDNN's (Yan, Wang,
# Chu 2020, "Optimizing Batched Winograd Convolution on GPUs").
_WINOGRAD_FILTER, _WINOGRAD_TILE = (3, 3), 2


def keep_channels_last(patches: Patches) -> None:
    """Give results of convolutions the layout that cuDNN gives them, until
    `patches.undo()`.

    Builds of torch for the CPU make all of them contiguous."""
    patches.set(torch._C, "_conv_determine_backend_memory_format", _layout)


def _layout(source: Any, weight: Any, _backend: Any) -> torch.memory_format:
    """Return the layout by the rule of `cudnn_conv_suggest_memory_format` in
    aten/src/ATen/native/ConvUtils.h."""
    layouts = {suggest_memory_format(tensor) for tensor in (source, weight)} - {
        torch.contiguous_format
    }
    doubles = torch.float64 in (source.dtype, weight.dtype)
    return (
        layouts.pop()
        if layouts and torch.backends.cudnn.enabled and not doubles
        else torch.contiguous_format
    )


def convolution_bytes(
    kind: Any, args: Any, capability: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return (typical, most) bytes of the workspaces that an operation of CONVOLUTIONS
    takes, in their order.

    Typically the gradient of the output is copied, and at most every tensor.
    `benchmarks/memory_estimates.py` has the jobs by which this was chosen, and others
    that it was tried on."""
    backward = kind is _aten.convolution_backward
    output, source, weight = args[:3] if backward else (None, *args[:2])
    groups = args[9] if backward else args[8]
    depthwise = groups == source.shape[1] > 1 and weight.shape[1] == 1
    cudnn = torch.backends.cudnn
    plain_fp32 = source.dtype is torch.float32 and not (
        cudnn.allow_tf32 and capability >= _TF32_CAPABILITY
    )
    if depthwise or plain_fp32 or not cudnn.enabled or not source.is_contiguous():
        return []  # a kernel of torch, no tensor cores, or nothing to transpose
    sizes = [tensor.numel() * tensor.element_size() for tensor in (source, weight)]
    if output is None:
        return [(0, sum(sizes))]
    gradient = output.numel() * output.element_size()
    return [(gradient + sizes[1], gradient + sum(sizes))] * sum(args[-1][:2])


class ConvolutionWork(NamedTuple):
    """The work of a convolution beside its bytes: floating-point operations, their
    type, its size as a product, the bytes that are moved to change layouts, and whether
    each filter reads one channel, by kernels outside of the matrix units."""

    flops: int
    precision: str
    size: ProductSize | None
    copied_bytes: int
    is_depthwise: bool


def convolution_work(
    func: Any, args: Any, kwargs: Any, output: Any, precision: str
) -> ConvolutionWork:
    """Return the work of a convolution or of its gradients; `output`: its result, or
    the gradient of its result.

    Each gradient takes as many operations as the forward; torch's counter takes that
    of the weight of a grouped one `groups` times."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    source, weight = given.get("input", given.get("self")), given["weight"]
    wide, narrow = (source, output) if given.get("transposed") else (output, source)
    groups, per_filter = given["groups"], math.prod(weight.shape[1:])
    flops = 2 * int(wide.numel()) * per_filter
    mask = given.get("output_mask", (True, False))[:2]
    if groups > 1 and weight.shape[1] == 1:
        return ConvolutionWork(flops * sum(mask), "float32", None, 0, True)
    channels = [tensor.shape[1] // groups for tensor in (wide, narrow)]
    elements = wide.numel() if "output_mask" not in given else 0
    targets = [t for t, wanted in zip((source, weight), mask, strict=True) if wanted]
    elements = elements or sum(int(tensor.numel()) for tensor in targets)
    inner = flops * sum(mask) / 2 / max(elements, 1)
    alignment = math.gcd(16, *(count * source.element_size() for count in channels))
    smallest = min(weight.shape[0] / groups, inner)
    reduction = _winograd_reduction(given, wide) if groups == 1 else 1.0
    size = ProductSize(elements, smallest, inner, alignment, reduction)
    copied = 0
    if precision != "float32" and suggest_memory_format(source) is _PLAIN:
        tensors = [output, weight, source]
        copied = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return ConvolutionWork(flops * sum(mask), precision, size, int(copied), False)


def _winograd_reduction(given: dict[str, Any], wide: Any) -> float:
    """Return the multiplications of a convolution over those of Winograd's algorithm,
    which has whole tiles; 1 where cuDNN does not have it: for other filters, steps and
    dilations, and for filters in channels-last."""
    filters = tuple(given["weight"].shape[2:])
    steps = {*given["stride"], *given["dilation"]}
    is_plain = suggest_memory_format(given["weight"]) is _PLAIN
    if filters != _WINOGRAD_FILTER or steps != {1} or not is_plain:
        return 1.0
    results = math.prod(wide.shape[2:])
    tiles = math.prod(-(-int(length) // _WINOGRAD_TILE) for length in wide.shape[2:])
    of_tile = (_WINOGRAD_TILE + _WINOGRAD_FILTER[0] - 1) ** 2
    return float(results * math.prod(filters) / (tiles * of_tile))
