"""The fused RMS norm, which a build for the CPU takes apart into element-wise operations."""

from __future__ import annotations

from typing import Any

import torch

# Operations that a build with CUDA does not take apart.
WHOLE_ON_DEVICE = frozenset({torch.ops.aten._fused_rms_norm.default})


def register_fused_norms(library: Any) -> None:
    """Register the operation for CUDA, in a library for `aten` whose `_destroy` removes it.

    Autograd then keeps it whole, with its own backward, and the dry run gives its result a shape.
    """
    library.impl("_fused_rms_norm", _never_called, "CUDA")


def _never_called(*_args: Any) -> Any:
    raise AssertionError("operations on the device are run by the mode of the dry run")
