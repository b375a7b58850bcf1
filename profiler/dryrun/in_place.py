"""Operations of autograd that write in place, and that run out of place on fake tensors."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_aten = torch.ops.aten
# The sum of two gradients of a tensor, and gradients of operations that read at indices.
_WRITES = frozenset(
    {
        _aten.add.Tensor,
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter_add.default,
        _aten.index_put.default,
        _aten.index_add.default,
    }
)
# References to a storage that nothing but the operation's first argument uses: of the tensor, and of its Python object.
_OWN_REFERENCES = 2
# References to the argument that is in no other hands than autograd's.
_OWN_TENSOR_REFERENCES = 4


def in_place_target(func: Any, args: Any) -> Any:
    """Return the storage that an operation called by autograd would write in place on a device; None if there is none.

    Autograd treats tensors of a subclass with care, and makes a new tensor.
    """
    if func not in _WRITES or torch._C._current_graph_task_id() == -1 or not _called_by_autograd():
        return None
    target = args[0]
    storage = target.untyped_storage()
    # Gradients that the caller of the backward gave are its own.
    if func is _aten.add.Tensor and target._use_count() > _OWN_TENSOR_REFERENCES:
        return None
    if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES + 1 or not _is_dense(target):
        return None
    return storage


def _is_dense(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


def _called_by_autograd() -> bool:
    """Return whether no Python code but that of the dry run lies between autograd and the operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ebbtide.profiler.dryrun"):
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.utils._python_dispatch"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
