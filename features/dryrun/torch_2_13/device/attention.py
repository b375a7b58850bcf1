"""Kernels that CUDA chooses and a CPU build has no rule for: attention, and norms that
are fused."""

import math
from collections import Counter
from typing import Any

import torch

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD = 256
_MASK_ALIGNMENT = 8
# Operations that a build with CUDA does not take apart.
WHOLE_ON_DEVICE = frozenset(
    {
        torch.ops.aten._fused_rms_norm.default,
        torch.ops.aten.silu_backward.default,
        torch.ops.aten.mish_backward.default,
    }
)


class AttentionChoice:
    """Chooses kernels by the rules of
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    `counts`: how often each kernel was chosen: `flash`, `efficient` or `math`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Run the operation with the kernel that an A100 or newer would run."""
        kernel = _kernel(query, key, value, attn_mask, enable_gqa)
        self.counts[kernel] += 1
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]


def register_attention(choice: AttentionChoice) -> Any:
    """Register the operation for CUDA, and return the library, whose `_destroy` removes
    it."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", choice.attend, key)
    return library


def _kernel(query: Any, key: Any, value: Any, mask: Any, enable_gqa: bool) -> str:
    heads_match = (
        query.dim() == 4 and query.shape[-3] == key.shape[-3] == value.shape[-3]
    )
    grouped = enable_gqa and query.dim() == 4 and key.shape[-3] == value.shape[-3]
    same_dtype = query.dtype == key.dtype == value.dtype
    non_empty = min(query.shape[-2], key.shape[-2]) > 0
    mask_has_gradient = mask is not None and mask.requires_grad
    if not (same_dtype and non_empty and query.dim() == 4):
        return "math"
    size, value_size = query.shape[-1], value.shape[-1]
    if (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dtype in _HALF
        and size == value_size <= _MAX_FLASH_HEAD
        and (heads_match or grouped)
    ):
        return "flash"
    if (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF, torch.float32)
        and heads_match
        and not mask_has_gradient
        and _is_aligned(query.dtype, size, value_size)
    ):
        return "efficient"
    return "math"


def _is_aligned(dtype: torch.dtype, *sizes: int) -> bool:
    alignment = 8 if dtype in _HALF else 4
    return all(size % alignment == 0 for size in sizes)


def _flash(
    query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None
) -> Any:
    size = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(size)
    padding = -size % 8
    if padding:
        query, key, value = (
            torch.nn.functional.pad(tensor, (0, padding))
            for tensor in (query, key, value)
        )
    result = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return result[..., :size] if padding else result


def _efficient(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Any:
    if mask is not None:
        mask = _bias(mask, query, key)
    logsumexp = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, logsumexp, dropout, causal, scale=scale
    )[0]


def _bias(mask: Any, query: Any, key: Any) -> Any:
    """Return the mask as the kernel takes it: a float tensor, aligned in its last
    dimension and expanded."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), float("-inf")
        )
    length = mask.shape[-1]
    if length % _MASK_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, (0, -length % _MASK_ALIGNMENT))[
            ..., :length
        ]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def register_whole_operations(library: Any) -> None:
    """Register operations for CUDA, in a library for `aten` whose `_destroy` removes
    them.

    Autograd then keeps them whole, with their own backward, and the dry run gives their
    results a shape."""
    for operation in WHOLE_ON_DEVICE:
        library.impl(operation, _never_called, "CUDA")


def _never_called(*_args: Any) -> Any:
    raise AssertionError("operations on the device are run by the mode of the dry run")
