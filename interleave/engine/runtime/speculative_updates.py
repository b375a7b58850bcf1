"""Speculative updates on the states: where they write, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.speculations import Speculations
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates


class SpeculativeUpdates:
    """The speculative updates of the current step.

    The new state is written into a spare, and the two are exchanged if it is valid. Of state in storage the file has
    the old version, so it is updated in the buffer into which it was read, and read again if it is not valid.

    Args:
        subgroups: The subgroups.
        states: Their states.
    """

    def __init__(self, subgroups: Sequence[Subgroup], states: SubgroupStates) -> None:
        self._subgroups = subgroups
        self._states = states
        self._speculations = Speculations(subgroups)
        # Subgroups in storage whose buffer has a result that is not known to be valid.
        self._outdated: set[int] = set()

    def begin_step(self) -> None:
        """Forget the updates of the step before. No operation may run meanwhile."""
        self._speculations = Speculations(self._subgroups)
        self._outdated.clear()

    def begin(self, subgroup: int, assumed: Sequence[Scalars | None]) -> bool:
        """Return whether an update is speculative; see `Speculations.begin`. Otherwise the state is the old one."""
        if self._speculations.begin(subgroup, assumed):
            return True
        self.restore(subgroup)
        return False

    def spare(self, subgroup: int) -> torch.Tensor | None:
        """Return the memory for the new state; None to update the state in place."""
        if not self._states.is_stored(subgroup):
            return self._states.spare(subgroup)
        self._outdated.add(subgroup)
        return None

    def end(self, subgroup: int) -> None:
        """End a speculative update, and use its result if it is known to be valid."""
        if self._speculations.end(subgroup):
            self._use(subgroup)

    def use_valid(self, scalars: Sequence[Scalars | None]) -> set[int]:
        """Use the results of those that have assumed the factors of the step, and return the other subgroups."""
        valid, invalid = self._speculations.validate(scalars)
        for subgroup in valid:
            self._use(subgroup)
        return invalid

    def invalidate(self) -> None:
        """Let all be done again, since the state changes that they have read. No operation may run meanwhile."""
        self._speculations.invalidate()
        for subgroup in list(self._outdated):
            self.restore(subgroup)

    def restore(self, subgroup: int) -> None:
        """Undo the update of a state in storage, if there was one."""
        if subgroup in self._outdated:
            self._states.reload(subgroup)
            self._outdated.discard(subgroup)

    def _use(self, subgroup: int) -> None:
        if self._states.is_stored(subgroup):
            self._outdated.discard(subgroup)
        else:
            self._states.use_spare(subgroup)
