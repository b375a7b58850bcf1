"""How far a backward has come, by the gradients that it has made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from ebbtide.interleave.engine.state_dict import local


class Progress:
    """Calls made(parameter's index, share of all gradients that there are now) when a backward has made a gradient for
    the last time in a step: a step may have several backwards, as many as the step before had. In the first step
    nothing is known, and nothing is said. made is a method, whose object this does not keep alive."""

    def __init__(self, params: Sequence[torch.Tensor], made: Callable[[int, float], None]) -> None:
        self._made_last = weakref.WeakMethod(made)
        self._sizes = [local(param).numel() for param in params]
        # A rank may hold empty shards alone.
        self._total = max(1, sum(self._sizes))
        self._times = [0] * len(params)
        self._expected = [0] * len(params)
        self._made = 0
        me = weakref.ref(self)
        self._handles: list[RemovableHandle] = []
        for index, param in enumerate(params):
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(_hook(me, index)))

    def stepped(self) -> None:
        """The step is over: what it had the next one will have."""
        self._expected, self._times, self._made = self._times, [0] * len(self._times), 0

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _fired(self, index: int) -> None:
        self._times[index] += 1
        if self._times[index] == self._expected[index]:
            self._made += self._sizes[index]
            made = self._made_last()
            if made is not None:
                made(index, self._made / self._total)


def _hook(progress: weakref.ref[Progress], index: int) -> Callable[[torch.Tensor], None]:
    def fired(_: torch.Tensor) -> None:
        found = progress()
        if found is not None:
            found._fired(index)

    return fired
