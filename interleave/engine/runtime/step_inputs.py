"""The tensors and factors that a step works with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.layout import ParamSegment, Subgroup


@dataclass
class StepInputs:
    """The tensors and factors of a step. Lists are indexed by parameter.

    Attributes:
        values: The parameters, flat, on the device.
        gradients: Gradients, flat, on the device, of the parameter's dtype; None where there is none.
        scalars: Factors of the update; None for a parameter that this step does not update.
        assumed: Factors that speculative updates assume before those of the step are known.
        streamed: Whether a gradient is dropped on the device after its copy to the host.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    scalars: list[Scalars | None] = field(default_factory=list)
    assumed: list[Scalars | None] = field(default_factory=list)
    streamed: bool = False

    def gradient(self, segment: ParamSegment) -> torch.Tensor:
        """Return the elements of a gradient on the device."""
        gradient = self.gradients[segment.param]
        assert gradient is not None
        return gradient[segment.begin : segment.end]

    def value(self, segment: ParamSegment) -> torch.Tensor:
        """Return the elements of a parameter."""
        return self.values[segment.param][segment.begin : segment.end]

    def updated_segments(self, subgroup: Subgroup) -> Iterator[tuple[ParamSegment, Scalars]]:
        """Yield the segments that this step updates, with their factors."""
        for segment in subgroup.segments:
            scalars = self.scalars[segment.param]
            if scalars is not None:
                yield segment, scalars

    def update_ranges(self, subgroup: Subgroup) -> Iterator[tuple[int, int, Scalars]]:
        """Yield (begin, end, factors) of adjacent segments that are updated with the same factors."""
        begin, end, last = 0, 0, None
        for segment, scalars in self.updated_segments(subgroup):
            if last is not None and (scalars != last or segment.offset != end):
                yield begin, end, last
                last = None
            if last is None:
                begin, last = segment.offset, scalars
            end = segment.span.stop
        if last is not None:
            yield begin, end, last
