"""Gradients that were copied to the host, and back to the device for their update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.runtime.arena import Arena, Block
from ebbtide.interleave.engine.runtime.device_blocks import gradient_elements
from ebbtide.interleave.engine.runtime.layout import ParamSegment, Subgroup
from ebbtide.interleave.engine.runtime.step_inputs import StepInputs


class ReturnedGradients:
    """The gradients of a step that are on the device again, each until its update.

    They are in the memory of their parameters, or in blocks of their own (see `gradient_elements`).

    Args:
        subgroups: The subgroups.
        device: The device.
        arena: Device memory.
    """

    def __init__(self, subgroups: Sequence[Subgroup], device: Device, arena: Arena) -> None:
        self._subgroups = subgroups
        self._device = device
        self._arena = arena
        # By subgroup; None for a gradient in the memory of its parameters.
        self._blocks: dict[int, Block | None] = {}

    def __contains__(self, subgroup: int) -> bool:
        """Return whether the gradient of a subgroup is on the device again."""
        return subgroup in self._blocks

    def issue(self, number: int, inputs: StepInputs, on_host: torch.Tensor) -> None:
        """Issue the copy of a subgroup's gradient to the device."""
        subgroup = self._subgroups[number]
        elements = gradient_elements(subgroup)
        block = self._blocks[number] = self._arena.take(elements) if elements else None
        if block is not None:
            self._device.wait("h2d", block.marks)
        segments = [segment for segment, _ in inputs.updated_segments(subgroup)]
        pairs = [(on_host[segment.span], self.gradient(number, segment, inputs)) for segment in segments]
        self._device.copy("h2d", pairs)

    def gradient(self, number: int, segment: ParamSegment, inputs: StepInputs) -> torch.Tensor:
        """Return the elements of a gradient on the device."""
        block = self._blocks[number]
        if block is None:
            return inputs.value(segment)
        return block.memory.view(self._subgroups[number].grad_dtype)[segment.span]

    def give(self, number: int) -> None:
        """Give the memory of a subgroup's gradient back, after its update was issued."""
        block = self._blocks.pop(number, None)
        if block is not None:
            self._arena.give(block, self._device.record("gpu"))

    def release(self) -> None:
        """Give the memory of all gradients back. No operation may run meanwhile."""
        for number in list(self._blocks):
            self.give(number)
