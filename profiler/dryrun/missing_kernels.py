"""Shapes of operations that torch has for a device, but not for tensors without memory."""

from __future__ import annotations

from typing import Any

import torch


def register_missing_kernels(library: Any) -> None:
    """Register the operations, in a library for `aten` whose `_destroy` removes them."""
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"):
        library.impl(name, _update_in_place, "Meta")
    for overload in ("", ".Tensor"):
        for owner in ("cudnn", "miopen"):
            library.impl(f"_use_{owner}_ctc_loss{overload}", _is_not_used, "Meta")
        library.impl(f"_ctc_loss{overload}", _ctc_loss, "Meta")
        library.impl(f"_ctc_loss_backward{overload}", _ctc_loss_backward, "Meta")


def _update_in_place(*_args: Any, **_kwargs: Any) -> None:
    return None


def _is_not_used(*_args: Any) -> bool:
    return False


def _ctc_loss(log_probs: Any, targets: Any, _input_lengths: Any, target_lengths: Any, *_args: Any) -> tuple[Any, Any]:
    """Return tensors like the losses and the table of the forward variables, for targets of the largest length."""
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if targets.dim() > 1:
        longest = targets.shape[1]
    elif isinstance(target_lengths, torch.Tensor):
        longest = targets.numel()
    else:
        longest = max(target_lengths, default=0)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, log_probs.shape[0], 2 * longest + 1)


def _ctc_loss_backward(_grad: Any, log_probs: Any, *_args: Any) -> Any:
    return torch.empty_like(log_probs)
