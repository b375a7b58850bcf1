"""Decides where an iteration ends: at which step of an optimizer."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from .spool import ITERATION_MARKS, PHASES

FORWARD, BACKWARD, UPDATE = range(len(PHASES))
UPDATED, ENDED, OPEN = range(len(ITERATION_MARKS))


class _Stepper:
    """An optimizer that steps, and its parameters by id. It keeps none of them
    alive."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.has_stepped = False
        self.parameters: dict[int, ref[Any]] = {}
        self._size = 0, 0

    def read(self, optimizer: Any) -> None:
        """Add parameters that the optimizer has got since the last call."""
        # Not of optimizers that contain others: reading their properties may have
        # effects.
        groups = getattr(optimizer, "__dict__", {}).get("param_groups")
        size = (len(groups), len(groups[-1]["params"])) if groups else (0, 0)
        if size != self._size:
            self._size = size
            for group in groups or ():
                self.parameters.update(
                    (id(parameter), ref(parameter)) for parameter in group["params"]
                )


class IterationRule:
    """Numbers iterations as optimizers step.

    `index` is the current iteration, -1 before the first update. An iteration ends at
    the last update before an optimizer, or a parameter, that has already stepped in it
    steps again after a backward: the two optimizers of a GAN make one, and gradient
    accumulation adds none, nor do ZeRO-3, which steps once per subgroup, and
    distributed checkpointing, which steps once before training to create state. Where
    an optimizer that has stepped in it is gone by then, a new one ends it, too.
    """

    def __init__(self) -> None:
        self.index = -1
        self._backwards = 0  # that had begun at the last update
        self._steppers: WeakKeyDictionary[Any, _Stepper] = WeakKeyDictionary()
        # Those that have stepped in this iteration, by the id of the optimizer: before
        # the last backward, and since.
        self._before: dict[int, _Stepper] = {}
        self._since: dict[int, _Stepper] = {}
        # None: not collected yet
        self._parameters_before: dict[int, ref[Any]] | None = None
        # The only one that has stepped since the iteration began.
        self._alone: _Stepper | None = None

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped."""
        return live_keys(self._steppers)

    def add_update(self, optimizers: list[Any], backwards: int) -> int | None:
        """Account for one update, and return the iteration that it ends.

        `backwards` counts the backwards that have begun in this process. The number is
        the same again while updates extend the iteration; None if the update belongs to
        none.
        """
        alone = self._alone
        has_backward = backwards > self._backwards
        if has_backward and len(optimizers) == 1 and alone is not None:
            # In half the time, what follows does for a job of one optimizer.
            (optimizer,) = optimizers
            if alone.optimizer() is optimizer:
                self._backwards = backwards
                self.index += 1
                alone.read(optimizer)
                return self.index
        if has_backward:
            self._backwards = backwards
            self._before.update(self._since)
            self._since, self._parameters_before = {}, None
        steppers = {id(optimizer): self._stepper(optimizer) for optimizer in optimizers}
        if any(self._begins(key, stepper) for key, stepper in steppers.items()):
            self.index += 1
            self._before, self._since, self._parameters_before = {}, {}, None
        for stepper in steppers.values():
            stepper.has_stepped = True
        self._since.update(steppers)
        self._alone = None
        if len(self._since) == 1 and not self._before and self.index >= 0:
            (self._alone,) = self._since.values()
        return self.index if self.index >= 0 else None

    def _stepper(self, optimizer: Any) -> _Stepper:
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            stepper = self._steppers[optimizer] = _Stepper(optimizer)
        stepper.read(optimizer)
        return stepper

    def _begins(self, key: int, stepper: _Stepper) -> bool:
        """Return whether an optimizer begins an iteration by its step."""
        if self.index < 0:
            return self._backwards > 0
        before = self._before
        if not before:
            return False
        if before.get(key) is stepper:
            return True
        if not stepper.has_stepped and any(
            other.optimizer() is None for other in before.values()
        ):
            return True
        if self._parameters_before is None:
            self._parameters_before = {}
            for other in before.values():
                self._parameters_before.update(other.parameters)
        common = self._parameters_before.keys() & stepper.parameters.keys()
        # An object has one reference, and another that has got its address has its own.
        return any(
            self._parameters_before[key] is stepper.parameters[key] for key in common
        )


class UnsteppedIterations:
    """Numbers iterations while no optimizer steps.

    One ends at the last phase before a forward that follows a backward. Where an
    optimizer steps later, they were micro-steps.
    """

    def __init__(self) -> None:
        self.number = 0
        self._has_backward = False
        self._last_sequence = 0

    def begins(self, phase: int) -> bool:
        """Return whether a phase, if it is kept, begins an iteration."""
        return phase == FORWARD and self._has_backward

    def add(self, phase: int, sequence: int) -> tuple[int, int, int] | None:
        """Account for a phase, and return an iteration that is new: ENDED or OPEN, its
        number, and the sequence number of its last phase so far."""
        news = None
        if self.begins(phase):
            news = ENDED, self.number, self._last_sequence
            self.number += 1
            self._has_backward = False
        elif phase == BACKWARD:
            news = OPEN, self.number, sequence
            self._has_backward = True
        self._last_sequence = sequence
        return news


def live_keys(mapping: WeakKeyDictionary[Any, Any]) -> list[Any]:
    """Return the keys, copied in one step: another thread may add one meanwhile."""
    return [key for reference in mapping.keyrefs() if (key := reference()) is not None]
