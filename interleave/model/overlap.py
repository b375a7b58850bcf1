"""Overlaps: which phases beside the step updates may run in."""

from __future__ import annotations

from typing import NamedTuple


class Overlap(NamedTuple):
    """Phases that updates may run in, beside the step.

    Attributes:
        forward: Whether updates may end in the next forward, as far as it does not need the parameters yet.
        backward: Whether updates on the CPU may run in the backward before it is known whether they are valid.
    """

    forward: bool = False
    backward: bool = False

    @property
    def name(self) -> str:
        """The value of a policy's option `overlap`."""
        return _NAMES[self.forward + 2 * self.backward]


_NAMES = ("none", "forward", "backward", "both")
NO_OVERLAP, BOTH = Overlap(), Overlap(forward=True, backward=True)
OVERLAPS = {overlap.name: overlap for overlap in (NO_OVERLAP, Overlap(forward=True), Overlap(backward=True), BOTH)}
