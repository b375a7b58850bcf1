"""Finds parameters that something holds besides their Python object, which may read
their memory unseen."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# References of a reducer to each parameter, before and after it has divided them into
# buckets again.
_REDUCER_REFERENCES = 2, 3


class ReferenceCounts:
    """Counts who holds parameters, and their memory, in C++. Those that only Python
    holds have one reference each, and everything that gets them later gets them from
    Python."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []

    def find_held(self, params: Sequence[torch.Tensor], views: int) -> list[bool]:
        """Return whether something else holds each parameter, or its memory.

        Its Python object, the graph that has computed its gradient,
        DistributedDataParallel, and a given number of own views do not count.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            # As long as this lives, each has one node that accumulates its gradient.
            edges = _GradientEdges.apply(*params)
            counts = [param._use_count() - 1 - param.requires_grad for param in params]
            del edges
            reducers = self._reducer_references(params, counts)
            pairs = zip(params, counts, strict=True)
            return [
                count > reducers.get(param, 0) or _shares_memory(param, views)
                for param, count in pairs
            ]

    def _reducer_references(
        self, params: Sequence[torch.Tensor], counts: list[int]
    ) -> dict[torch.Tensor, int]:
        if (
            not any(counts)
            or not torch.distributed.is_available()
            or not torch.distributed.is_initialized()
        ):
            return {}
        if counts != self._counts:
            # The search takes as long as a collection of garbage.
            wrappers = [
                value
                for value in gc.get_objects()
                if type(value) is DistributedDataParallel
            ]
            self._counts, self._wrappers = counts, list(map(weakref.ref, wrappers))
        references: dict[torch.Tensor, int] = {}
        for wrapper in filter(None, (reference() for reference in self._wrappers)):
            for param in wrapper.parameters():
                count = _REDUCER_REFERENCES[wrapper._has_rebuilt_buckets]
                references[param] = references.get(param, 0) + count
        return references


class _GradientEdges(torch.autograd.Function):  # type: ignore[misc]
    """Has the nodes that accumulate its arguments' gradients as those before it."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def _shares_memory(param: torch.Tensor, views: int) -> bool:
    """Return whether something else has the memory of a parameter, too: a view of it,
    the array or the file that the memory belongs to, or another process."""
    storage = param.untyped_storage()
    is_own = storage.resizable() and (
        storage.device.type != "cpu" or not storage.is_shared()
    )
    # One reference of the tensor, and one of this variable.
    return not is_own or torch._C._storage_Use_Count(storage._cdata) > 2 + views
