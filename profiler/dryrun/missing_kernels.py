"""Shapes of operations that torch has for a device, but not for tensors without memory."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.profiler.agent.patches import Patches


def register_missing_kernels(library: Any, patches: Patches) -> None:
    """Register the operations.

    Args:
        library: A library for `aten`, whose `_destroy` removes them.
        patches: The replacements, which `patches.undo()` removes.
    """
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"):
        library.impl(name, _update_in_place, "Meta")
    for owner in ("cudnn", "miopen"):
        library.impl(f"_use_{owner}_ctc_loss", _is_not_used, "Meta")
    library.impl("_ctc_loss_backward", _ctc_loss_backward, "Meta")
    ctc_loss = torch.ctc_loss

    def ctc_loss_of_numbers(scores: Any, targets: Any, lengths: Any, target_lengths: Any, *args: Any) -> Any:
        """Compute the loss with lengths as numbers, which torch reads from tensors, but not from fake ones."""
        return ctc_loss(scores, targets, _numbers(lengths), _numbers(target_lengths), *args)

    patches.set(torch, "ctc_loss", ctc_loss_of_numbers)


def _numbers(lengths: Any) -> Any:
    return [int(length) for length in lengths.flatten()] if isinstance(lengths, torch.Tensor) else lengths


def _update_in_place(*_args: Any, **_kwargs: Any) -> None:
    return None


def _is_not_used(*_args: Any) -> bool:
    return False


def ctc_loss_like(log_probs: Any, targets: Any, _lengths: Any, target_lengths: Any, *_args: Any) -> tuple[Any, Any]:
    """Return tensors like the losses and the table of `aten::_ctc_loss`, for targets of the largest length."""
    longest = targets.shape[1] if targets.dim() > 1 else max(target_lengths, default=0)
    batch = log_probs.shape[1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, log_probs.shape[0], 2 * longest + 1)


def _ctc_loss_backward(_grad: Any, log_probs: Any, *_args: Any) -> Any:
    return torch.empty_like(log_probs)
