"""Shapes of the batches that torch's data loaders give to the job."""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import tensors_in
from ebbtide.profiler.agent.patches import Patches

_LOOKED_AT = 32
# Frameworks fetch a batch ahead: the longest one reaches the model in the second of
# these iterations.
_LONG_ITERATIONS = 2
Shape = tuple[int, ...]


class BatchLengths:
    """Follows the shapes of batches, and gives the longest of the next ones when it is
    asked to."""

    def __init__(self) -> None:
        # By loader: the shape of the largest tensor of each batch.
        self._shapes: dict[int, set[Shape]] = {}
        self._long_iterations = 0

    @property
    def seen(self) -> tuple[Shape, Shape] | None:
        """The smallest and the largest batch of the loader whose batches vary the most;
        None: batches are alike."""
        ranges = [
            sorted(shapes, key=math.prod)
            for shapes in self._shapes.values()
            if len(shapes) > 1
        ]
        widest = max(
            ranges,
            key=lambda shapes: math.prod(shapes[-1]) - math.prod(shapes[0]),
            default=None,
        )
        return None if widest is None else (widest[0], widest[-1])

    def install(self, patches: Patches) -> None:
        """Follow torch's data loaders until `patches.undo()`."""
        kind = torch.utils.data.DataLoader
        iterate = kind.__iter__
        patches.set(
            kind, "__iter__", lambda loader: self.follow(id(loader), iterate(loader))
        )

    def needs_longest(self) -> bool:
        """Return whether an iteration with the longest batch is to follow, as where
        batches vary, and begin it."""
        if self.seen is None or self._long_iterations == _LONG_ITERATIONS:
            return False
        self._long_iterations += 1
        return True

    def follow(self, loader: int, batches: Any) -> Iterator[Any]:
        """Give the batches of a loader; where the longest one is asked for, the longest
        of the next ones in place of each."""
        shapes = self._shapes.setdefault(loader, set())
        for batch in batches:
            ahead = [
                batch,
                *islice(batches, _LOOKED_AT - 1 if self._long_iterations else 0),
            ]
            shapes.update(map(_shape, ahead))
            longest = max(ahead, key=lambda each: math.prod(_shape(each)))
            yield from [longest] * len(ahead)


def _shape(batch: Any) -> Shape:
    """Return the shape of the largest tensor in a batch."""
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    return max(
        (tuple(tensor.shape) for tensor in tensors_in(values)),
        key=math.prod,
        default=(),
    )
