"""The definition of the AdamW update with an fp32 master: every kernel on every device gives these bits.

All arithmetic is IEEE binary32: each operation rounds once, to nearest with ties to even; quotient and root are
correctly rounded too, no multiply-add is fused, subnormals are kept. From the gradient g of a parameter, its master p,
its moments m and v and the scalars of the step (`Hyper.scalars`), products before sums and from left to right:

    g  = g * scale                            the gradient converted to fp32, which is exact
    m' = m + share1 * (g - m)                 share1 is 1 - beta1; if it is 0.5 or more: g - beta1 * (g - m)
    v' = beta2 * v + share2 * g * g           share2 is 1 - beta2
    p' = kept * p - rate * m' / (sqrt(v') / root + eps)
    out = p' in the parameter's precision     to nearest, ties to even; infinite beyond its range

This is torch.optim.AdamW and its order of operations (decoupled weight decay: Loshchilov and Hutter, arXiv:1711.05101).
The kernels of torch fuse some operations, and their vectorized root is not always rounded correctly. Multiplying by a
scale of 1 changes no bit, so it is never skipped. A NaN result is stored as the one quiet NaN without sign and payload,
since processors differ in the NaN that they produce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]

NAN = 0x7FC00000
BFLOAT16_NAN = 0x7FC0
FLOAT16_NAN = 0x7E00


class Scalars(NamedTuple):
    """The factors of one step, named as in the formula of this module; each rounded once, from double to fp32."""

    scale: np.float32
    beta1: np.float32
    share1: np.float32
    beta2: np.float32
    share2: np.float32
    kept: np.float32
    rate: np.float32
    root: np.float32
    eps: np.float32


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of AdamW, named as in torch. `weight_decay` is decoupled."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def scalars(self, step: int, scale: float = 1.0) -> Scalars:
        """Return the factors of a step.

        Args:
            step: The step, counted from 1.
            scale: Factor for each gradient (clip factor times 1 / loss scale).
        """
        kept = 1 - self.lr * self.weight_decay
        rate = self.lr / (1 - self.beta1**step)
        root = math.sqrt(1 - self.beta2**step)
        values = (scale, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, kept, rate, root, self.eps)
        return Scalars(*map(np.float32, values))


def update(
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor,
    scalars: Scalars,
) -> None:
    """Update master and moments (fp32) in place and write the parameter `out`.

    All are CPU tensors of one shape; `grad` and `out` are bfloat16, float16 or float32."""
    scale, beta1, share1, beta2, share2, kept, rate, root, eps = scalars
    grad, out = grad.detach(), out.detach()
    p, m, v = (tensor.detach().numpy() for tensor in (master, exp_avg, exp_avg_sq))
    # NaN and overflow are ordinary results here.
    with np.errstate(all="ignore"):
        g = grad.float().numpy() * scale
        m[...] = canonical_nan(m + share1 * (g - m) if share1 < 0.5 else g - beta1 * (g - m))
        v[...] = canonical_nan(beta2 * v + share2 * g * g)
        p[...] = canonical_nan(kept * p - rate * m / (np.sqrt(v) / root + eps))
    if out.dtype == torch.float32:
        out.numpy()[...] = p
    else:
        bits = bfloat16_bits(p) if out.dtype == torch.bfloat16 else float16_bits(p)
        out.view(torch.uint16).numpy()[...] = bits


def canonical_nan(values: Floats) -> Floats:
    """Return the values with every NaN replaced by the one quiet NaN."""
    return np.where(np.isnan(values), np.uint32(NAN).view(np.float32), values)


def bfloat16_bits(values: Floats) -> Halves:
    """Return the bits of the values rounded to bfloat16: to nearest, ties to even.

    The addition before the shift carries into the exponent, up to infinity. NaN is excluded, since 0x7fffffff would
    become -0."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(BFLOAT16_NAN), rounded.astype(np.uint16))


def float16_bits(values: Floats) -> Halves:
    """Return the bits of the values rounded to float16: to nearest, ties to even; infinite from 65,520 on."""
    with np.errstate(all="ignore"):
        rounded: Any = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(FLOAT16_NAN), rounded)
