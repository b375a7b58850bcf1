"""Copies of gradients that begin in the backward, while the job has the gradients."""

from collections.abc import Collection, Sequence

import torch

from ebbtide.interleave.engine.params.local_shards import flat_like, local_shard
from ebbtide.interleave.engine.runtime.engine import Engine


class EarlyCopies:
    """Begins to copy the gradients of subgroups to the host, as a backward computes
    them.

    A subgroup's copy begins when all of its watched parameters have their gradients.
    The engine copies again at the step what has changed since, or was missing.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        engine: Engine,
        watched: Collection[int],
    ) -> None:
        self._params = params
        self._engine = engine
        self._params_of = [
            sorted({segment.param for segment in subgroup.segments})
            for subgroup in engine.store.subgroups
        ]
        self._watched = [set(own).intersection(watched) for own in self._params_of]
        self.begin()

    def begin(self) -> None:
        """Begin an iteration."""
        self._awaited = [set(own) for own in self._watched]

    def gradient_ready(self, index: int) -> None:
        """Take the gradient of a watched parameter, computed for the last time."""
        if not self._engine.copies_early:
            return
        for subgroup in self._engine.store.subgroups_of(index):
            awaited = self._awaited[subgroup]
            awaited.discard(index)
            if not awaited:
                self._engine.copy_gradients(subgroup, self._gradients(subgroup))

    def _gradients(self, subgroup: int) -> dict[int, torch.Tensor]:
        """Return the gradients of a subgroup that there are, flat, by parameter."""
        gradients = {}
        for index in self._params_of[subgroup]:
            param = self._params[index]
            if param.grad is None:
                continue
            gradient, value = local_shard(param.grad).detach(), local_shard(param)
            # The step raises an error for others.
            if not gradient.is_sparse and gradient.dtype == value.dtype:
                gradients[index] = flat_like(gradient, param)
        return gradients


def first_params(engine: Engine) -> set[int]:
    """Return the first parameter of each subgroup, whose gradient comes last."""
    return {
        min(segment.param for segment in subgroup.segments)
        for subgroup in engine.store.subgroups
        if subgroup.segments
    }
