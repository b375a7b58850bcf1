"""Speculative updates of a step: what they assumed, and whether it came true."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.layout import Subgroup


class Speculations:
    """The speculative updates of one step.

    They write beside the old state, with the factors of a step that is neither clipped nor skipped. When the factors
    are known, the new state of a subgroup is valid if they are those that its update assumed. Threads may call all
    methods.

    Args:
        subgroups: The subgroups.
    """

    def __init__(self, subgroups: Sequence[Subgroup]) -> None:
        self._subgroups = subgroups
        self._lock = threading.Lock()
        # What the updates that have begun assumed, by subgroup: the factors of its segments, None after `invalidate`.
        self._assumed: dict[int, list[Scalars | None] | None] = {}
        self._ended: set[int] = set()
        # The factors of the step by parameter, once they are known.
        self._scalars: Sequence[Scalars | None] | None = None

    def begin(self, subgroup: int, assumed: Sequence[Scalars | None]) -> bool:
        """Begin the update of a subgroup, and return whether it is speculative.

        Args:
            subgroup: The subgroup.
            assumed: The factors that it assumes, by parameter.

        Returns:
            False if the factors of the step are known already.
        """
        with self._lock:
            if self._scalars is not None:
                return False
            self._assumed[subgroup] = self._of_segments(subgroup, assumed)
            return True

    def end(self, subgroup: int) -> bool:
        """End a speculative update, and return whether the new state is known to be valid."""
        with self._lock:
            self._ended.add(subgroup)
            return self._scalars is not None and self._is_valid(subgroup)

    def validate(self, scalars: Sequence[Scalars | None]) -> tuple[set[int], set[int]]:
        """Tell the factors of the step, by parameter.

        Returns:
            The subgroups whose speculative update has ended and is valid, and those whose update is not.
        """
        with self._lock:
            self._scalars = scalars
            valid = set(filter(self._is_valid, self._assumed))
            return valid & self._ended, self._assumed.keys() - valid

    def invalidate(self) -> None:
        """Make all updates that have begun invalid, since the state that they have read changes."""
        with self._lock:
            self._assumed = dict.fromkeys(self._assumed)

    def _is_valid(self, subgroup: int) -> bool:
        assert self._scalars is not None
        return self._assumed[subgroup] == self._of_segments(subgroup, self._scalars)

    def _of_segments(self, subgroup: int, scalars: Sequence[Scalars | None]) -> list[Scalars | None]:
        return [scalars[segment.param] for segment in self._subgroups[subgroup].segments]
