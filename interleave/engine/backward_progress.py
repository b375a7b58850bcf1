"""The progress of a backward, from the gradients that it has computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from ebbtide.interleave.engine.local_shards import local_shard


class BackwardProgress:
    """Reports each gradient as soon as a backward has computed it for the last time in a step.

    A step may have several backwards: as many as the step before had. In the first step that number is not known, and
    nothing is reported.

    Args:
        params: The parameters to watch.
        on_gradient: A method to call with the index of the parameter for each of its gradients. What it raises, the
            backward raises. As of the other one, its object is not kept alive.
        on_ready: A method to call with the index of the parameter and the share of all gradients that are ready. The
            object that it is bound to is not kept alive.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        on_gradient: Callable[[int], None],
        on_ready: Callable[[int, float], None],
    ) -> None:
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._on_ready = weakref.WeakMethod(on_ready)
        self._sizes = [local_shard(param).numel() for param in params]
        # A rank may have only empty shards.
        self._total_size = max(1, sum(self._sizes))
        self._times = [0] * len(params)
        self._expected_times = [0] * len(params)
        self._ready_size = 0
        weak_self = weakref.ref(self)
        self._handles: list[RemovableHandle] = []
        for index, param in enumerate(params):
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(_make_hook(weak_self, index)))

    def end_step(self) -> None:
        """Expect as many gradients of each parameter in the next step as this step had."""
        self._expected_times, self._times, self._ready_size = self._times, [0] * len(self._times), 0

    def remove_hooks(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _count_gradient(self, index: int) -> None:
        on_gradient = self._on_gradient()
        if on_gradient is not None:
            on_gradient(index)
        self._times[index] += 1
        if self._times[index] == self._expected_times[index]:
            self._ready_size += self._sizes[index]
            on_ready = self._on_ready()
            if on_ready is not None:
                on_ready(index, self._ready_size / self._total_size)


def _make_hook(progress_ref: weakref.ref[BackwardProgress], index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        progress = progress_ref()
        if progress is not None:
            progress._count_gradient(index)

    # torch.compile cannot trace it.
    untraced: Callable[[torch.Tensor], None] = torch._disable_dynamo(hook)
    return untraced
