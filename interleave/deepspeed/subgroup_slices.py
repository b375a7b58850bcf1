"""Slices of DeepSpeed's subgroups, which the engine moves and updates, and the gradients of slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.runtime.layout import ParamSegment, Subgroup


@dataclass(frozen=True)
class SubgroupSlice:
    """A run of elements of one of DeepSpeed's subgroups, which the engine moves and updates as one.

    Attributes:
        group: The number of DeepSpeed's subgroup.
        begin: First element, in the subgroup.
        end: Element after the last one.
    """

    group: int
    begin: int
    end: int

    @property
    def params(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class ParamExtent:
    """The elements of a subgroup that are this rank's part of a parameter.

    Attributes:
        group: The number of DeepSpeed's subgroup.
        begin: First element, in the subgroup.
        end: Element after the last one.
    """

    group: int
    begin: int
    end: int


def cut_subgroups(sizes: Sequence[int], max_params: int) -> list[SubgroupSlice]:
    """Cut DeepSpeed's subgroups into slices, in order.

    Args:
        sizes: Elements of each of DeepSpeed's subgroups.
        max_params: Maximum elements of a slice.
    """
    return [
        SubgroupSlice(group, begin, min(size, begin + max_params))
        for group, size in enumerate(sizes)
        for begin in range(0, size, max_params)
    ]


def engine_subgroups(slices: Sequence[SubgroupSlice], dtype: torch.dtype, grad_dtype: torch.dtype) -> list[Subgroup]:
    """Return the slices as subgroups of the engine: each has one flat parameter."""
    return [
        Subgroup(part.params, dtype, (ParamSegment(number, 0, part.params, 0),), grad_dtype)
        for number, part in enumerate(slices)
    ]


class SliceGradients:
    """Collects the gradients of parameters into gradients of slices.

    The gradient of a slice is in a buffer on the device. The buffer exists from the first gradient of the slice that is
    added until the gradient is taken out. Elements without a gradient are zero.

    Args:
        slices: The slices.
        extents: The extents of the parameters that this rank has elements of, by parameter.
        dtype: The type in which gradients accumulate.

    Attributes:
        params: The elements of all extents.
    """

    def __init__(self, slices: Sequence[SubgroupSlice], extents: Mapping[int, ParamExtent], dtype: torch.dtype) -> None:
        self._slices = slices
        self._extents = extents
        self._dtype = dtype
        self.params = sum(extent.end - extent.begin for extent in extents.values())
        self._slices_of = {param: self._overlapping(extent) for param, extent in extents.items()}
        self._buffers: dict[int, torch.Tensor] = {}
        self._added: set[int] = set()
        self._expected = [0] * len(slices)
        for numbers in self._slices_of.values():
            for number in numbers:
                self._expected[number] += 1
        self._missing = list(self._expected)

    def __contains__(self, param: int) -> bool:
        """Return whether this rank has elements of a parameter."""
        return param in self._extents

    def slices_of(self, param: int) -> Sequence[int]:
        """Return the slices that have elements of a parameter; none if this rank has none."""
        return self._slices_of.get(param, ())

    @property
    def is_empty(self) -> bool:
        """Whether no gradient was added since the last step."""
        return not self._added

    def clear(self) -> None:
        """Drop all gradients, after a step or if there is none."""
        self._buffers.clear()
        self._added.clear()
        self._missing = list(self._expected)

    def has_gradient(self, param: int) -> bool:
        """Return whether the gradient of a parameter was added since the last step."""
        return param in self._added

    def add(self, param: int, gradient: torch.Tensor) -> list[int]:
        """Add the gradient of a parameter.

        Args:
            param: The parameter.
            gradient: The gradient, flat; shorter than the extent if that ends in padding.

        Returns:
            The slices whose gradient is complete with it.
        """
        completed = []
        for number, slice_span, param_span in self._overlaps(param, gradient.numel()):
            self._buffer(number, gradient.device)[slice_span].copy_(gradient[param_span])
        if param not in self._added:
            self._added.add(param)
            for number in self._slices_of[param]:
                self._missing[number] -= 1
                if not self._missing[number]:
                    completed.append(number)
        return completed

    def param_gradient(self, param: int, device: torch.device) -> torch.Tensor:
        """Return the gradient of a parameter, flat, in new memory; zero if it was not added."""
        extent = self._extents[param]
        gradient = torch.zeros(extent.end - extent.begin, dtype=self._dtype, device=device)
        for number, slice_span, param_span in self._overlaps(param, gradient.numel()):
            if number in self._buffers:
                gradient[param_span] = self._buffers[number][slice_span]
        return gradient

    def pop(self, number: int, device: torch.device) -> torch.Tensor:
        """Remove and return the gradient of a slice."""
        buffer = self._buffer(number, device)
        del self._buffers[number]
        return buffer

    def restore(self, number: int, gradient: torch.Tensor) -> None:
        """Put the gradient of a slice back."""
        self._buffers[number] = gradient

    def _buffer(self, number: int, device: torch.device) -> torch.Tensor:
        if number not in self._buffers:
            self._buffers[number] = torch.zeros(self._slices[number].params, dtype=self._dtype, device=device)
        return self._buffers[number]

    def _overlapping(self, extent: ParamExtent) -> list[int]:
        return [
            number
            for number, part in enumerate(self._slices)
            if part.group == extent.group and part.begin < extent.end and extent.begin < part.end
        ]

    def _overlaps(self, param: int, length: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (number of the slice, span in it, span in the parameter) for the first elements of a parameter."""
        extent = self._extents[param]
        for number in self._slices_of[param]:
            part = self._slices[number]
            begin, end = max(part.begin, extent.begin), min(part.end, extent.begin + length)
            if begin < end:
                yield (
                    number,
                    slice(begin - part.begin, end - part.begin),
                    slice(begin - extent.begin, end - extent.begin),
                )
