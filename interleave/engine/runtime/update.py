"""Updates: what the optimizer does to all parameters once.

An update lasts from the first gradient until nothing of the update runs.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.engine.rules.rule import Scalars, UpdateRange
from ebbtide.interleave.engine.runtime.layout import ParamSegment, Subgroup


class UpdatePhase(Enum):
    """The phases of an update, see docs/engine.md."""

    OPEN = "open"  # The job computes gradients; some may be offloaded already.
    # The engine has all gradients. The update may still be dropped.
    SUBMITTED = "submitted"
    DECIDED = "decided"  # The factors are known: parameters change from now on.
    LATE = "late"  # The step has returned, and late operations may run.
    # No operation of the update runs: it is done, or dropped before it was decided.
    ENDED = "ended"
    # An operation failed, and the update was completed on the CPU.
    RECOVERED = "recovered"
    LOST = "lost"  # An operation failed, and nobody knows the state.


_RUNNING = (
    UpdatePhase.OPEN,
    UpdatePhase.SUBMITTED,
    UpdatePhase.DECIDED,
    UpdatePhase.LATE,
)


@dataclass(eq=False)
class Update:
    """The tensors and factors of one update, and how far it was done.

    Attributes:
        number: Updates are numbered from 0; one that is dropped has a number, too.
        values: Parameters, flat, on their device.
        gradients: By parameter, flat, on the device; None for one that the update has
            not, or not any more.
        scalars: The factors by parameter; None for one that stays as it is.
        assumed: The factors that speculative operations assume, until `scalars` are
            known.
        streamed: Whether gradients are dropped on the device after their copy to the
            host.
        offloaded: Parameters whose gradients were offloaded before the step.
        copied: Subgroups whose gradients are on the host.
        copies: By subgroup that was copied before the step, while the job had its
            gradients: the fingerprints of the copies, by parameter.
        stale_share: The share of these subgroups that are copied again; None: there
            are none.
        missing: By subgroup: how many of its parameters have gradients that are not
            offloaded.
        marks: By subgroup: what its offloaded gradients are issued before.
        updated: Subgroups whose newest state is this update's.
        written: Subgroups whose parameters on the device are this update's.
        unfinished: Subgroups whose update has started and not ended: if it raises,
            nobody knows what it has changed.
        backward_mark: A mark of when the backward began; None before.
        step_mark: The same of the step.
        decided_s: When the factors were known, on the clock of time.perf_counter.
        returned_s: When the step returned before its late operations had ended; None:
            it has not.
    """

    number: int = 0
    values: Sequence[torch.Tensor] = ()
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    scalars: list[Scalars | None] = field(default_factory=list)
    assumed: list[Scalars | None] = field(default_factory=list)
    streamed: bool = False
    phase: UpdatePhase = UpdatePhase.OPEN
    offloaded: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    copies: dict[int, dict[int, bytes]] = field(default_factory=dict)
    stale_share: float | None = None
    missing: list[int] = field(default_factory=list)
    marks: list[list[Mark]] = field(default_factory=list)
    updated: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    backward_mark: Mark | None = None
    step_mark: Mark | None = None
    decided_s: float = math.inf
    returned_s: float | None = None

    @classmethod
    def of_params(
        cls, params: int, subgroups: Sequence[Subgroup], number: int, streamed: bool
    ) -> "Update":
        """Return an open update of `params` parameters."""
        return cls(
            number=number,
            gradients=[None] * params,
            scalars=[None] * params,
            streamed=streamed,
            missing=[
                len({segment.param for segment in of.segments}) for of in subgroups
            ],
            marks=[[] for _ in subgroups],
        )

    @property
    def is_running(self) -> bool:
        """Whether operations of the update may run."""
        return self.phase in _RUNNING

    def offload(
        self, param: int, gradient: torch.Tensor, mark: Mark, subgroups: Collection[int]
    ) -> list[int]:
        """Take a gradient that is issued before a mark.

        Return those of its subgroups that now have all gradients.
        """
        self.gradients[param] = gradient
        self.offloaded.add(param)
        for subgroup in subgroups:
            self.marks[subgroup].append(mark)
            self.missing[subgroup] -= 1
        return [subgroup for subgroup in subgroups if not self.missing[subgroup]]

    def submit(self, mark: Mark) -> None:
        """Take all gradients as issued before a mark."""
        self.phase, self.step_mark = UpdatePhase.SUBMITTED, mark

    def decide(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Scalars | None],
        now_s: float,
    ) -> None:
        """Take the parameters, and the factors, which are known now."""
        self.values, self.scalars = values, list(scalars)
        self.phase, self.decided_s = UpdatePhase.DECIDED, now_s

    def return_late(self, now_s: float) -> None:
        """Let late operations run while the job goes on."""
        self.phase, self.returned_s = UpdatePhase.LATE, now_s

    def gradient(self, segment: ParamSegment) -> torch.Tensor:
        """Return the elements of a gradient on the device."""
        gradient = self.gradients[segment.param]
        assert gradient is not None
        return gradient[segment.begin : segment.end]

    def value(self, segment: ParamSegment) -> torch.Tensor:
        """Return the elements of a parameter."""
        return self.values[segment.param][segment.begin : segment.end]

    def updated_segments(
        self, subgroup: Subgroup, is_speculative: bool = False
    ) -> Iterator[tuple[ParamSegment, Scalars]]:
        """Yield the segments that are updated, with their factors.

        The factors may be assumed ones.
        """
        factors = self.assumed if is_speculative else self.scalars
        for segment in subgroup.segments:
            scalars = factors[segment.param]
            if scalars is not None:
                yield segment, scalars

    def ranges(
        self, subgroup: Subgroup, is_speculative: bool = False
    ) -> Iterator[UpdateRange]:
        """Yield the ranges of segments that are updated.

        Adjacent ones with the same factors are one range, unless the rule needs to know
        where parameters begin.
        """
        updated = self.updated_segments(subgroup, is_speculative)
        if subgroup.rule.has_ranges:
            for segment, scalars in updated:
                span, block = segment.span, segment.block
                yield UpdateRange(
                    span.start,
                    span.stop,
                    scalars,
                    segment.position,
                    segment.shape,
                    block,
                )
            return
        begin, end, last = 0, 0, None
        for segment, scalars in updated:
            if last is not None and (scalars != last or segment.offset != end):
                yield UpdateRange(begin, end, last)
                last = None
            if last is None:
                begin, last = segment.offset, scalars
            end = segment.span.stop
        if last is not None:
            yield UpdateRange(begin, end, last)
