"""Decides when the iterations of a dry run are whole."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

# Iterations, and kernels in them, for which an optimizer that has not stepped is waited
# for: a WGAN trains its generator once in five iterations, or in a hundred. Of longer
# iterations only the five are waited for: others train one network for long, and then
# the next one.
MOST_WAITED_ITERATIONS = 200
MOST_WAITED_KERNELS = 20_000
LEAST_WAITED_ITERATIONS = 5
MOST_KERNELS = 100_000


class IterationEnd:
    """Knows which optimizers there are, and which have stepped in an iteration.

    An iteration is whole when each that stepped in the one before has stepped as often
    in it; or, where one of them does not, when the next iteration begins.

    Attributes:
        made: The optimizers that the job has made and still has.
        stepped: Those that have stepped, also inside of others.
        left_out: Classes of those that were waited for in vain.
    """

    def __init__(self, stepped: WeakSet[Any]) -> None:
        self.made: WeakSet[Any] = WeakSet()
        self.stepped = stepped
        self.left_out: list[str] = []
        self._steps_before: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._index = -1
        # Iterations of the first steps, and those that have stepped in a later one.
        self._first: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._repeated: WeakSet[Any] = WeakSet()
        self._waited_iterations = 0
        self._kernels_before: int | None = None

    def begin(self) -> None:
        """Begin an iteration."""
        self._steps_before, self._steps = self._steps, WeakKeyDictionary()
        self._index += 1

    def add(self, optimizers: list[Any]) -> bool:
        """Account for an update, and return whether its iteration is whole."""
        for optimizer in optimizers:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
            if self._first.setdefault(optimizer, self._index) < self._index:
                self._repeated.add(optimizer)
        return not self.unstepped() and all(
            self._steps.get(optimizer, 0) >= number
            for optimizer, number in list(self._steps_before.items())
        )

    def waits(self, kernels: int, iterations: int) -> bool:
        """Return whether more iterations are to come, since an optimizer has not
        stepped; or, if several are asked for, since one that steps rarely has not
        stepped beside its state.

        `kernels`: the number of kernels so far; `iterations`: that are asked for."""
        if self._kernels_before is None:
            self._kernels_before = kernels
        self._waited_iterations += 1
        self.left_out = [type(optimizer).__name__ for optimizer in self.unstepped()]
        is_early = bool(self.left_out) or (iterations > 1 and self._is_rare())
        waited = kernels - self._kernels_before
        if self._waited_iterations <= LEAST_WAITED_ITERATIONS:
            return is_early and waited <= MOST_KERNELS
        return (
            is_early
            and self._waited_iterations <= MOST_WAITED_ITERATIONS
            and waited <= MOST_WAITED_KERNELS
        )

    def _is_rare(self) -> bool:
        """Return whether an optimizer may step again soon: after as many iterations as
        before its first step; if that was in the first one, after a few."""
        return any(
            self._index < (2 * (first + 1) if first else 1 + LEAST_WAITED_ITERATIONS)
            for optimizer, first in list(self._first.items())
            if optimizer not in self._repeated
        )

    def unstepped(self) -> list[Any]:
        """Return the optimizers whose parameters none that has stepped has."""
        waiting = [one for one in list(self.made) if one not in self.stepped]
        if not waiting:
            return []
        updated = {
            id(parameter)
            for optimizer in list(self.stepped)
            for parameter in _trained(optimizer)
        }
        return [
            optimizer
            for optimizer in waiting
            if any(id(parameter) not in updated for parameter in _trained(optimizer))
        ]


def _trained(optimizer: Any) -> Iterator[Any]:
    # Not of optimizers that contain others: reading their properties may have effects.
    for group in getattr(optimizer, "__dict__", {}).get("param_groups", ()):
        yield from (each for each in group["params"] if each.requires_grad)
