"""Tensors on the host as arrays for the compiled loops.

Also the checks that kernels make of their tensors.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ebbtide.interleave.engine.rules.rule import UpdateRule

# Tensors with fewer elements are copied to one array, at most this many at once: an
# array for each costs more.
_SMALL, _BATCH = 1024, 4096

# The types by which the compiled loops recognize what an array contains.
_CODES = {torch.bfloat16: "<u2", torch.float16: "<i2", torch.float32: "<f4"}
# Parts of masters, and codes of moments, which are in no gradient or parameter.
_STATE_CODES = {torch.int16: "<u2", torch.uint8: "|u1"}

# Rows of a state whose distance is this, beside whole pages of 4,096 B: a third of a
# page, in whole lines of the cache.
_PAGE, _ROW_OFFSET = 4096 // 4, 1344 // 4


def row_stride(params: int) -> int:
    """Return the distance, in elements, of the rows of a state for the fastest updates
    on the CPU.

    All rows begin a line of the cache, and at different places of a page: streaming
    stores to several rows at the same place of their pages are slow
    (docs/performance.md, updates out of place). A row of `params` elements may be
    shorter than the distance by up to a page.
    """
    return params + (_ROW_OFFSET - params) % _PAGE


def check_each(device: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors of any lengths, each as `check_tensors` checks a gradient."""
    for tensor in tensors:
        if not (
            tensor.dtype in _CODES
            and tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.device.type == device
        ):
            check_tensors(device, (tensor,))


def check_tensors(
    device: str, stored: Sequence[torch.Tensor], state: Sequence[torch.Tensor] = ()
) -> None:
    """Check the tensors of a kernel call.

    A kernel would read and write beyond tensors that do not match.

    Gradient and parameter are stored in any precision of parameters, the state is fp32.
    Raises ValueError if a tensor is of another kind."""
    tensors = (*stored, *state)
    if any(tensor.dtype not in _CODES for tensor in stored) or any(
        tensor.dtype != torch.float32 for tensor in state
    ):
        raise ValueError(
            "gradient and parameter must be bfloat16, float16 or float32, master and "
            "moments float32"
        )
    # Not len(tensor), which takes fifty times as long.
    length = tensors[0].numel()
    if any(
        tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != length
        for tensor in tensors
    ):
        raise ValueError(
            "gradient, master, moments and parameter must be contiguous, with one "
            "dimension and length"
        )
    common = tensors[0].device
    if common.type != device or any(tensor.device != common for tensor in tensors):
        raise ValueError(
            f"gradient, master, moments and parameter must be on one {device} device"
        )


def check_update(
    device: str,
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    rule: UpdateRule,
    out: torch.Tensor | None = None,
) -> None:
    """Check the tensors of an update as `check_tensors`."""
    stored, wide = [grad] if out is None else [grad, out], list(state)
    if rule.split is not None:
        if (
            out is None
            or out.dtype != rule.split.param_dtype
            or state[0].dtype != rule.split.dtype
        ):
            raise ValueError(
                f"{rule.name} needs a parameter that is {rule.split.param_dtype}, and "
                "the masters' part"
            )
        stored.append(wide.pop(0).view(rule.split.param_dtype))
    elif out is None and state[0].dtype != torch.float32:
        # A parameter that is its own master.
        stored.append(wide.pop(0))
    moments = state[1 : 1 + len(rule.moments)]
    if any(moment.dtype != rule.moment_dtype for moment in moments):
        raise ValueError(f"moments of this rule must be {rule.moment_dtype}")
    if rule.moment_dtype != torch.float32:
        wide = wide[: len(wide) - len(state[1:])]
        stored += [] if rule.scales else moments
    check_tensors(device, stored, wide)
    if rule.scales:
        scales = state[1 + len(rule.moments) :]
        check_tensors(device, (), scales)
        is_flat = all(
            row.dim() == 1 and row.is_contiguous() and row.device == grad.device
            for row in moments
        )
        if not is_flat or any(row.numel() != grad.numel() for row in moments):
            raise ValueError(
                "moments must be contiguous, with the length of the gradient, on its "
                "device"
            )


def check_disjoint(
    old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], rows: int
) -> None:
    """Check that an out-of-place update does not write to the old master and moments.

    Raises ValueError if they share memory.
    """
    if len(old) != rows or len(new) != rows:
        raise ValueError(
            f"old and new state must have {rows} rows, not {len(old)} and {len(new)}"
        )
    spans = sorted(
        (row.data_ptr(), row.data_ptr() + row.nbytes) for row in (*old, *new)
    )
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
        raise ValueError("master and moments, old and new, must share no memory")


class _Memory:
    """The memory of a contiguous tensor, which it keeps alive, for NumPy."""

    def __init__(self, tensor: torch.Tensor, code: str) -> None:
        self._tensor = tensor
        address = tensor.data_ptr(), False
        self.__array_interface__ = {
            "shape": (tensor.numel(),),
            "typestr": code,
            "data": address,
            "version": 3,
        }


def as_array(tensor: torch.Tensor) -> Any:
    """Return the same memory as a flat array for the compiled loops.

    Not by `numpy()`, which marks the memory as an array's for ever."""
    return np.asarray(
        _Memory(tensor, _STATE_CODES.get(tensor.dtype) or _CODES[tensor.dtype])
    )


def as_arrays(tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield `as_array` of each tensor.

    For small tensors of one dtype in a row, yield the elements of a common copy.
    """
    for (is_small, _), run in itertools.groupby(
        tensors, lambda tensor: (tensor.numel() < _SMALL, tensor.dtype)
    ):
        if not is_small:
            yield from map(as_array, run)
            continue
        while batch := list(itertools.islice(run, _BATCH)):
            array, end = as_array(torch.cat(batch)), 0
            for tensor in batch:
                begin, end = end, end + tensor.numel()
                yield array[begin:end]
