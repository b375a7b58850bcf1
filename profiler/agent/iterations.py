"""Finds where one iteration ends and the next begins, from the order in which optimizers step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


class IterationRule:
    """Numbers iterations as optimizers step.

    An iteration ends at the last update before an optimizer that has already stepped in it steps again. The two
    optimizers of a GAN therefore make one iteration, and gradient accumulation adds none. A step that no backward came
    before does not begin an iteration: ZeRO-3 steps once per subgroup, and distributed checkpointing steps an optimizer
    once before training to create its state.

    Attributes:
        index: The current iteration; -1 before the first update.
    """

    def __init__(self) -> None:
        self.index = -1
        self._members: WeakSet[Any] = WeakSet()
        self._backwards_at_step: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def add_update(self, optimizers: Iterable[Any], backwards: int) -> int | None:
        """Account for one update.

        Args:
            optimizers: The optimizers that stepped in it.
            backwards: How many backward passes have begun so far in this process.

        Returns:
            The iteration that the update ends (the same number again while updates extend it), or None if the update
            belongs to no training iteration.
        """
        optimizers = list(optimizers)
        after_backward = [o for o in optimizers if backwards > self._backwards_at_step.get(o, 0)]
        if after_backward:
            if self.index < 0 or any(o in self._members for o in after_backward):
                self.index += 1
                self._members.clear()
            for optimizer in optimizers:
                self._members.add(optimizer)
                self._backwards_at_step[optimizer] = backwards
        return self.index if self.index >= 0 else None
