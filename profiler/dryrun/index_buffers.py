"""Memory that CUDA takes to add values at indices, which it sorts first."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
INDEX_WRITES = frozenset({_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten.embedding_dense_backward})
_INDEX_BYTES = 8
# Up to so many indices, the gradient of an embedding is added without sorting.
_UNSORTED = 3072


def index_buffers(kind: Any, args: Any) -> list[int]:
    """Return the bytes of the buffers that an operation of INDEX_WRITES takes while it runs, in their order.

    The rules are those of `index_put_with_sort_kernel` in aten/src/ATen/native/cuda/Indexing.cu, and of
    `embedding_dense_backward_cuda` in Embedding.cu.
    """
    if kind is _aten.embedding_dense_backward:
        count = args[1].numel()
        return [_INDEX_BYTES * count] * 3 if count > _UNSORTED else []
    target, indices, values = args[0], [index for index in args[1] if index is not None], args[2]
    if len(args) < 4 or not args[3] or not indices:
        return []
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    linear = [_INDEX_BYTES * count] * 2
    wanted = count * target.shape[len(indices) :].numel()
    expanded = [] if values.numel() == wanted else [wanted * values.element_size()]
    return [*linear, *expanded, *[_INDEX_BYTES * count] * 3]
