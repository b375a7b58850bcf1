"""Where one iteration ends and the next begins, from the order in which optimizers step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


class IterationRule:
    """Numbers iterations as optimizers step.

    An iteration ends at the last update before an optimizer that has already stepped in it steps again. So the two
    optimizers of a GAN make one iteration, and gradient accumulation none of its own. A step that no backward came
    before is not a new one: ZeRO-3 steps once per subgroup, and distributed checkpointing steps an optimizer once
    before training to make its state.
    """

    def __init__(self) -> None:
        self.index = -1
        self._members: WeakSet[Any] = WeakSet()
        self._backwards_at_step: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def stepped(self, optimizers: Iterable[Any], backwards: int) -> int | None:
        """Account for one update.

        optimizers: those that stepped in it. backwards: how many backward passes have begun so far in this
        process. Returns the iteration that the update ends (the same number again while updates extend it), or
        None where it belongs to no training iteration.
        """
        optimizers = list(optimizers)
        fresh = [o for o in optimizers if backwards > self._backwards_at_step.get(o, 0)]
        if fresh:
            if self.index < 0 or any(o in self._members for o in fresh):
                self.index += 1
                self._members.clear()
            for optimizer in optimizers:
                self._members.add(optimizer)
                self._backwards_at_step[optimizer] = backwards
        return self.index if self.index >= 0 else None
