"""Workspaces of cuDNN's convolutions.

torch takes the first algorithm of cuDNN's heuristics whose workspace it gets
(aten/src/ATen/native/cudnn/Conv_v8.cpp). Tensor cores read channels-last tensors: cuDNN
copies others (the "automatic transpose operations" of NVIDIA's guide to convolutional
layers).
"""

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ebbtide.profiler.agent.patches import Patches

_aten = torch.ops.aten
CONVOLUTIONS = frozenset({_aten.convolution, _aten.convolution_backward})
_TF32_CAPABILITY = (8, 0)  # From Ampere on, tensor cores take fp32 as tf32.


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
