"""Finds where one iteration ends and the next begins, from the order in which optimizers step."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary


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
        # Optimizer -> (the backwards that had begun at its last step, the iteration of that step).
        self._last_steps: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped."""
        return live_keys(self._last_steps)

    def add_update(self, optimizers: list[Any], backwards: int) -> int | None:
        """Account for one update.

        `backwards`: how many have begun so far in this process.

        Returns:
            The iteration that the update ends (the same number again while updates extend it), or None if the update
            belongs to no training iteration.
        """
        index = self.index
        after_backward, begins = False, index < 0
        for optimizer in optimizers:
            before, iteration = self._last_steps.get(optimizer, (0, -1))
            if backwards > before:
                after_backward = True
                begins = begins or iteration == index
        if after_backward:
            if begins:
                self.index = index = index + 1
            for optimizer in optimizers:
                self._last_steps[optimizer] = backwards, index
        return index if index >= 0 else None


def live_keys(mapping: WeakKeyDictionary[Any, Any]) -> list[Any]:
    """Return the keys, copied in one step: another thread may add one meanwhile."""
    return [key for reference in mapping.keyrefs() if (key := reference()) is not None]
