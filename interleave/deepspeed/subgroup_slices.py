"""How DeepSpeed's subgroups are cut for the engine, and how a slice's gradient is put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.runtime.layout import Piece, Subgroup


@dataclass(frozen=True)
class Slice:
    """A run of elements of one of DeepSpeed's subgroups: what the engine moves and updates as one."""

    group: int
    begin: int
    end: int

    @property
    def params(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Extent:
    """Where this rank's part of a parameter lies in its subgroup."""

    group: int
    begin: int
    end: int


def cut(sizes: Sequence[int], most: int) -> list[Slice]:
    """Slices of at most so many elements, in order. sizes: elements of each of DeepSpeed's subgroups."""
    return [
        Slice(group, begin, min(size, begin + most))
        for group, size in enumerate(sizes)
        for begin in range(0, size, most)
    ]


def subgroups(slices: Sequence[Slice], dtype: torch.dtype, grad_dtype: torch.dtype) -> list[Subgroup]:
    """What the engine takes them for: each is one flat parameter."""
    return [
        Subgroup(piece.params, dtype, (Piece(number, 0, piece.params, 0),), grad_dtype)
        for number, piece in enumerate(slices)
    ]


class Gradients:
    """Gradients of slices, each in a buffer on the device that is there from the first parameter of it to arrive until
    it is let go. extents: by parameter, of those that this rank has elements of; params: elements of all of them.
    dtype: what gradients accumulate in. What does not arrive is zero."""

    def __init__(self, slices: Sequence[Slice], extents: Mapping[int, Extent], dtype: torch.dtype) -> None:
        self._slices = slices
        self._extents = extents
        self._dtype = dtype
        self.params = sum(extent.end - extent.begin for extent in extents.values())
        self._touches = {param: self._overlapping(extent) for param, extent in extents.items()}
        self._buffers: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()
        self._expected = [0] * len(slices)
        for touched in self._touches.values():
            for number in touched:
                self._expected[number] += 1
        self._missing = list(self._expected)

    def __contains__(self, param: int) -> bool:
        """Whether this rank has elements of a parameter."""
        return param in self._extents

    @property
    def any(self) -> bool:
        """Whether a gradient has arrived since the last step."""
        return bool(self._arrived)

    def forget(self) -> None:
        """The step is over, or there is none."""
        self._buffers.clear()
        self._arrived.clear()
        self._missing = list(self._expected)

    def has(self, param: int) -> bool:
        """Whether a parameter's gradient has arrived since the last step."""
        return param in self._arrived

    def arrive(self, param: int, gradient: torch.Tensor) -> list[int]:
        """A parameter's gradient (flat; shorter than its extent where that ends in padding) is made. Returns the slices
        that are whole with it."""
        whole = []
        for number, here, there in self._parts(param, gradient.numel()):
            self._buffer(number, gradient.device)[here].copy_(gradient[there])
        if param not in self._arrived:
            self._arrived.add(param)
            for number in self._touches[param]:
                self._missing[number] -= 1
                if not self._missing[number]:
                    whole.append(number)
        return whole

    def of_param(self, param: int, device: torch.device) -> torch.Tensor:
        """A parameter's gradient, flat, in new memory; zero where it has not arrived."""
        extent = self._extents[param]
        found = torch.zeros(extent.end - extent.begin, dtype=self._dtype, device=device)
        for number, here, there in self._parts(param, found.numel()):
            if number in self._buffers:
                found[there] = self._buffers[number][here]
        return found

    def take(self, number: int, device: torch.device) -> torch.Tensor:
        """The gradient of a slice, which is not kept here any more."""
        buffer = self._buffer(number, device)
        del self._buffers[number]
        return buffer

    def put(self, number: int, gradient: torch.Tensor) -> None:
        """Keep a slice's gradient here again."""
        self._buffers[number] = gradient

    def _buffer(self, number: int, device: torch.device) -> torch.Tensor:
        if number not in self._buffers:
            self._buffers[number] = torch.zeros(self._slices[number].params, dtype=self._dtype, device=device)
        return self._buffers[number]

    def _overlapping(self, extent: Extent) -> list[int]:
        return [
            number
            for number, piece in enumerate(self._slices)
            if piece.group == extent.group and piece.begin < extent.end and extent.begin < piece.end
        ]

    def _parts(self, param: int, length: int) -> Iterator[tuple[int, slice, slice]]:
        """(slice's number, where in it, where in the parameter) of the first `length` elements of a parameter."""
        extent = self._extents[param]
        for number in self._touches[param]:
            piece = self._slices[number]
            begin, end = max(piece.begin, extent.begin), min(piece.end, extent.begin + length)
            if begin < end:
                yield (
                    number,
                    slice(begin - piece.begin, end - piece.begin),
                    slice(begin - extent.begin, end - extent.begin),
                )
