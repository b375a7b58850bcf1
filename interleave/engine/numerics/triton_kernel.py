"""The update on a GPU with the bits of the reference (reference.py): one Triton kernel, the same order of operations.

Quotient and root are rounded to nearest, and multiply-adds are not fused (`enable_fp_fusion=False`). Importing this
module needs triton, which comes with CUDA builds of torch.
"""

# triton types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.fingerprint import FACTOR, MIX_FACTOR
from ebbtide.interleave.engine.numerics.fingerprint import LANES as FINGERPRINT_LANES
from ebbtide.interleave.engine.numerics.kernels import check_tensors
from ebbtide.interleave.engine.numerics.norm import BLOCK, LANES, total
from ebbtide.interleave.engine.numerics.reference import BFLOAT16_NAN, FLOAT16_NAN, NAN, Scalars

_NAN = tl.constexpr(NAN)
_BFLOAT16_NAN = tl.constexpr(BFLOAT16_NAN)
_FLOAT16_NAN = tl.constexpr(FLOAT16_NAN)
_FACTOR = tl.constexpr(FACTOR)
_MIX_FACTOR = tl.constexpr(MIX_FACTOR)
_ROWS = tl.constexpr(BLOCK // LANES)
_PROGRAM = 1024
# Triton's interpreter runs on the CPU.
_DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.float16, torch.float32: torch.float32}


@triton.jit
def _canonical_nan(value):
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(value != value, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def _widen(stored):
    # bfloat16 is passed as uint16, so that devices without bfloat16 can run this too.
    if stored.dtype == tl.uint16:
        wide = (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = stored.to(tl.float32)
    return wide


@triton.jit
def _round(value, dtype: tl.constexpr):
    if dtype == tl.uint16:
        bits = value.to(tl.uint32, bitcast=True)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where(value != value, _BFLOAT16_NAN, half).to(tl.uint16)
    elif dtype == tl.float16:
        half = value.to(tl.float16).to(tl.uint16, bitcast=True)
        result = tl.where(value != value, _FLOAT16_NAN, half).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        result = value
    return result


# Each variant compiles for a quarter of a second, so there are none for lengths.
@triton.jit(do_not_specialize=["length"])
def _update(
    grad, master, exp_avg, exp_avg_sq, out, length,
    scale, beta1, share1, beta2, share2, kept, rate, root, eps,
    size: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    mask = offsets < length
    g = _widen(tl.load(grad + offsets, mask=mask)) * scale
    m = tl.load(exp_avg + offsets, mask=mask)
    m = _canonical_nan(m + share1 * (g - m) if share1 < 0.5 else g - beta1 * (g - m))
    v = _canonical_nan(beta2 * tl.load(exp_avg_sq + offsets, mask=mask) + share2 * g * g)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    p = _canonical_nan(kept * tl.load(master + offsets, mask=mask) - tl.div_rn(rate * m, denominator))
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    tl.store(master + offsets, p, mask=mask)
    tl.store(out + offsets, _round(p, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _lane_sums(grad, sums, length, lanes: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * (_ROWS * lanes)
    lane = tl.arange(0, lanes)
    summed = tl.zeros((lanes,), tl.float64)
    for row in range(_ROWS):
        offsets = begin + row * lanes + lane
        value = _widen(tl.load(grad + offsets, mask=offsets < length, other=0)).to(tl.float64)
        summed += value * value
    tl.store(sums + tl.program_id(0) * lanes + lane, summed)


@triton.jit
def _weights(indices):
    products = indices.to(tl.uint32) * _FACTOR
    return (products ^ (products >> 16)) | 1


@triton.jit
def _mixed(sums):
    products = (sums ^ (sums >> 16)) * _MIX_FACTOR
    return products ^ (products >> 16)


@triton.jit(do_not_specialize=["length"])
def _fingerprint(words, total, length, size: tl.constexpr, lanes: tl.constexpr):
    block = tl.program_id(0)
    begin = block.to(tl.int64) * size
    lane = tl.arange(0, lanes)
    sums = tl.zeros((lanes,), tl.uint32)
    for row in range(size // lanes):
        offsets = begin + row * lanes + lane
        mask = offsets < length
        word = tl.load(words + offsets, mask=mask, other=0).to(tl.uint32)
        sums = tl.where(mask, sums * _FACTOR + word, sums)
    # Sums of integers do not depend on the order in which programs end.
    tl.atomic_add(total, (tl.sum(_mixed(sums) * _weights(lane), 0) * _weights(block)).to(tl.int32, bitcast=True))


def gpu_update(
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor,
    scalars: Scalars,
) -> None:
    """Run `CpuKernel.update` for tensors on one GPU, on its current stream; return before it is done.

    Raises ValueError for tensors that `CpuKernel.update` does not support."""
    check_tensors(_DEVICE, (grad, out), (master, exp_avg, exp_avg_sq))
    length = master.numel()
    if length:
        grid = (triton.cdiv(length, _PROGRAM),)
        tensors = (
            grad.detach().view(_BITS[grad.dtype]),
            master,
            exp_avg,
            exp_avg_sq,
            out.detach().view(_BITS[out.dtype]),
        )
        with torch.cuda.device_of(master):
            _update[grid](*tensors, length, *map(float, scalars), size=_PROGRAM, enable_fp_fusion=False)


def gpu_sum_of_squares(gradient: torch.Tensor) -> Callable[[], float]:
    """Start `CpuKernel.sum_of_squares` of a gradient on a GPU; return a function that waits for the result."""
    check_tensors(_DEVICE, (gradient,))
    blocks = triton.cdiv(gradient.numel(), BLOCK)
    lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=gradient.device)
    if blocks:
        with torch.cuda.device_of(gradient):
            values = gradient.detach().view(_BITS[gradient.dtype])
            _lane_sums[(blocks,)](values, lanes, gradient.numel(), lanes=LANES, enable_fp_fusion=False)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lambda: total(lanes[:, 0].tolist())


def gpu_fingerprint(values: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Start `CpuKernel.fingerprint` of tensors on a GPU, on its current stream; return a function that waits for the
    results."""
    totals = torch.zeros(len(values), dtype=torch.int32, device=values[0].device if values else _DEVICE)
    for index, value in enumerate(values):
        check_tensors(_DEVICE, (value,))
        words = value.detach().view(torch.uint16)
        blocks = triton.cdiv(len(words), FINGERPRINT_BLOCK)
        if blocks:
            _fingerprint[(blocks,)](words, totals[index:], len(words), size=FINGERPRINT_BLOCK, lanes=FINGERPRINT_LANES)
    return lambda: [total % 2**32 for total in totals.tolist()]
