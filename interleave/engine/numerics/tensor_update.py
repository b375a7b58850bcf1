"""A run of elements that one update changes with the same factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.numerics.reference import Scalars


@dataclass(frozen=True)
class TensorUpdate:
    """Tensors of an update: contiguous, on one device, with one dimension and the same length.

    Attributes:
        grad: Gradient, bfloat16, float16 or float32.
        master: Master weights, fp32; or their remainders, int16, whose parameters (bfloat16) are in `out`.
        exp_avg: First moment, fp32.
        exp_avg_sq: Second moment, fp32.
        out: Parameter to write, bfloat16, float16 or float32.
        scalars: The factors of the step.
    """

    grad: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor
    scalars: Scalars
