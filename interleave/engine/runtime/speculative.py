"""Updates that run before the factors of the step are known."""

from collections.abc import Collection, Sequence

import torch

from ebbtide.interleave.engine.forks import fork_lock
from ebbtide.interleave.engine.rules.rule import Scalars
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates
from ebbtide.interleave.engine.runtime.transfer_buffers import TransferBuffers
from ebbtide.interleave.engine.runtime.update import Update


class SpeculativeUpdates:
    """The speculative updates of a step, by any thread, with the factors of a step that
    is neither clipped nor skipped.

    The new state is written into a spare, and the two are exchanged if the step is so.
    State in storage is updated in its buffer, and read again from its file if it is not
    valid. `buffers` have the parameters that updates read."""

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        states: SubgroupStates,
        buffers: TransferBuffers,
    ) -> None:
        self._subgroups = subgroups
        self._states = states
        self._buffers = buffers
        self._lock = fork_lock()
        self.begin_step(Update())

    def begin_step(self, update: Update) -> None:
        """Speculate on an update, and forget the one before. No operation may run
        meanwhile."""
        self._update = update
        # The factors that the updates that have begun assumed, by subgroup: of its
        # segments, None after `invalidate`.
        self._assumed: dict[int, list[Scalars | None] | None] = {}
        self._ended: set[int] = set()
        # The factors of the step by parameter, once they are known.
        self._scalars: Sequence[Scalars | None] | None = None
        # Subgroups in storage whose buffer has a result that is not known to be valid.
        self._outdated: set[int] = set()

    def begin(self, subgroup: int, assumed: Sequence[Scalars | None] | None) -> bool:
        """Begin an update that assumes these factors, by parameter.

        Return False if the factors of the step are known.

        None: it cannot run yet, and is to be done when they are known."""
        with self._lock:
            is_speculative = self._scalars is None
            if is_speculative:
                self._assumed[subgroup] = (
                    None if assumed is None else self._of_segments(subgroup, assumed)
                )
        if not is_speculative:
            self.restore(subgroup)
        return is_speculative

    def spare(self, subgroup: int) -> torch.Tensor | None:
        """Return the memory for the new state; None to update the state in place."""
        if not self._states.is_backed(subgroup):
            return self._states.spares[subgroup]
        self._outdated.add(subgroup)
        return None

    def end(self, subgroup: int) -> None:
        """End a speculative update, and use its result if it is known to be valid."""
        with self._lock:
            self._ended.add(subgroup)
            is_valid = self._scalars is not None and self._is_valid(subgroup)
        if is_valid:
            self._use(subgroup)

    def use_valid(self, scalars: Sequence[Scalars | None]) -> set[int]:
        """Use the results of updates that assumed the factors of the step.

        Return the other subgroups.
        """
        with self._lock:
            self._scalars = scalars
            valid = set(filter(self._is_valid, self._assumed))
            ended, invalid = valid & self._ended, self._assumed.keys() - valid
        for subgroup in ended:
            self._use(subgroup)
        return invalid

    def invalidate(self, subgroups: Collection[int]) -> None:
        """Let those of subgroups be done again, since what they have read changes. No
        operation may run meanwhile."""
        self._assumed |= dict.fromkeys(self._assumed.keys() & subgroups)
        for subgroup in self._outdated.intersection(subgroups):
            self.restore(subgroup)

    def restore(self, subgroup: int) -> None:
        """Undo the update of a state in storage, if there was one."""
        if subgroup in self._outdated:
            self._states.reload(subgroup)
            self._buffers.outdated_params.add(subgroup)
            self._outdated.discard(subgroup)

    def _is_valid(self, subgroup: int) -> bool:
        assert self._scalars is not None
        return self._assumed[subgroup] == self._of_segments(subgroup, self._scalars)

    def _of_segments(
        self, subgroup: int, scalars: Sequence[Scalars | None]
    ) -> list[Scalars | None]:
        return [
            scalars[segment.param] for segment in self._subgroups[subgroup].segments
        ]

    def _use(self, subgroup: int) -> None:
        if self._states.is_backed(subgroup):
            self._outdated.discard(subgroup)
        else:
            self._states.use_spare(subgroup)
            self._buffers.use_spare(subgroup)
        self._update.updated.add(subgroup)
