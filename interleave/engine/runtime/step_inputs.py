"""The tensors and factors that a step works with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ebbtide.interleave.engine.numerics.reference import Scalars


@dataclass
class StepInputs:
    """The tensors and factors of a step. Lists are indexed by parameter.

    Attributes:
        values: The parameters, flat, on the device.
        gradients: Gradients, flat, on the device, of the parameter's dtype; None where there is none.
        scalars: Factors of the update; None for a parameter that this step does not update.
        streamed: Whether a gradient is dropped on the device after its copy to the host.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    scalars: list[Scalars | None] = field(default_factory=list)
    streamed: bool = False
