"""Slices of DeepSpeed's subgroups, and the gradients of slices.

The engine moves and updates them.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.rules.rule import UpdateRule
from ebbtide.interleave.engine.runtime.layout import MASTER, ParamSegment, Subgroup
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates


@dataclass(frozen=True)
class SubgroupSlice:
    """A run of elements of one of DeepSpeed's subgroups, by its number.

    The engine updates it as one; it may also be a parameter.

    `end` is the element after the last one."""

    group: int
    begin: int
    end: int

    @property
    def params(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def cut_subgroups(sizes: Sequence[int], max_params: int) -> list[SubgroupSlice]:
    """Cut DeepSpeed's subgroups of these sizes into slices, in order.

    A slice has at most `max_params` elements.
    """
    return [
        SubgroupSlice(group, begin, min(size, begin + max_params))
        for group, size in enumerate(sizes)
        for begin in range(0, size, max_params)
    ]


def engine_subgroups(
    slices: Sequence[SubgroupSlice],
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    rules: Sequence[UpdateRule],
) -> list[Subgroup]:
    """Return the slices as subgroups of the engine: each has one flat parameter.
    `rules` are by DeepSpeed's subgroup; of rules of whole matrices, the engine has the
    end."""
    own = [rules[part.group].ending for part in slices]
    return [
        Subgroup(
            part.params,
            dtype,
            (ParamSegment(number, 0, part.params, 0),),
            grad_dtype,
            rule=rule,
        )
        for number, (part, rule) in enumerate(zip(slices, own, strict=True))
    ]


class SliceGradients:
    """Collects the gradients of parameters into gradients of slices.

    The extents of parameters are this rank's parts of them.

    The gradient of a slice is in a buffer on the device. The buffer exists from the
    first gradient of the slice that is added until the gradient is taken out. Elements
    without a gradient are zero."""

    def __init__(
        self,
        slices: Sequence[SubgroupSlice],
        extents: Mapping[int, SubgroupSlice],
        dtype: torch.dtype,
    ) -> None:
        self._slices = slices
        self._extents = extents
        self._dtype = dtype
        self.params = sum(extent.params for extent in extents.values())
        self._slices_of = {
            param: self._overlapping(extent) for param, extent in extents.items()
        }
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
        """Return the slices that have elements of a parameter.

        There are none if this rank has none.
        """
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
        """Add the gradient of a parameter, flat.

        Return the slices whose gradient is complete with it.

        It is shorter than the extent if that ends in padding."""
        completed = []
        for number, slice_span, param_span in self._overlaps(param, gradient.numel()):
            self._buffer(number, gradient.device)[slice_span].copy_(
                gradient[param_span]
            )
        if param not in self._added:
            self._added.add(param)
            for number in self._slices_of[param]:
                self._missing[number] -= 1
                if not self._missing[number]:
                    completed.append(number)
        return completed

    def param_gradient(self, param: int, device: torch.device) -> torch.Tensor:
        """Return the gradient of a parameter, flat, in new memory; zero if it was not
        added."""
        extent = self._extents[param]
        gradient = torch.zeros(extent.params, dtype=self._dtype, device=device)
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
            self._buffers[number] = torch.zeros(
                self._slices[number].params, dtype=self._dtype, device=device
            )
        return self._buffers[number]

    def _overlapping(self, extent: SubgroupSlice) -> list[int]:
        return [
            number
            for number, part in enumerate(self._slices)
            if part.group == extent.group
            and part.begin < extent.end
            and extent.begin < part.end
        ]

    def _overlaps(self, param: int, length: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the overlaps of a parameter's first elements with slices.

        Each is (number of the slice, span in it, span in the parameter).
        """
        extent = self._extents[param]
        for number in self._slices_of[param]:
            part = self._slices[number]
            begin, end = (
                max(part.begin, extent.begin),
                min(part.end, extent.begin + length),
            )
            if begin < end:
                yield (
                    number,
                    slice(begin - part.begin, end - part.begin),
                    slice(begin - extent.begin, end - extent.begin),
                )


class HeldMasters:
    """Masters and moments that are views of the engine's host buffers.

    The engine keeps its state there.
    """

    def __init__(
        self,
        optimizer: Any,
        rules: Sequence[UpdateRule],
        masters: Sequence[torch.Tensor],
        slices: Sequence[SubgroupSlice],
        device: Device,
    ) -> None:
        self._optimizer = optimizer
        self._rules = rules
        self._masters = masters
        shapes = [
            (len(rule.row_names), master.numel())
            for rule, master in zip(rules, masters, strict=True)
        ]
        self._buffers = [device.allocate_host(shape, torch.float32) for shape in shapes]
        self.collect()
        # Host memory for the state of each slice, where the momentum of matrices is not
        # the engine's.
        rows = [len(rule.ending.row_names) for rule in rules]
        self.slice_buffers = [
            self._buffers[of.group][: rows[of.group], of.begin : of.end]
            for of in slices
        ]

    def show(self, states: SubgroupStates, groups: Iterable[int]) -> None:
        """Give masters and moments their values, which the caller may change.

        All state moves to the host.
        """
        states.move_all_to_host()

    def write_back(self, states: SubgroupStates) -> None:
        """Do nothing: changes were made to the engine's state itself."""

    def release(self) -> None:
        """Do nothing: the memory is the engine's."""

    def collect(self) -> None:
        """Take moments by which torch has replaced those that were shown."""
        for rule, master, buffer in zip(
            self._rules, self._masters, self._buffers, strict=True
        ):
            _use_host_buffer(self._optimizer, rule, master, buffer)


class StoredMasters:
    """Masters and moments with elements, whose numbers are `sizes`, in host memory from
    `show` to `write_back` only."""

    # The engine has its own.
    slice_buffers = None

    def __init__(
        self,
        optimizer: Any,
        rule: UpdateRule,
        masters: Sequence[torch.Tensor],
        sizes: Sequence[int],
        slices: Sequence[SubgroupSlice],
    ) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._masters = masters
        self._sizes = sizes
        self._slices = slices
        # Of the groups that are shown.
        self._buffers: dict[int, torch.Tensor] = {}
        for master in masters:
            _bind(optimizer, rule, master, self._empty(0))

    def show(self, states: SubgroupStates, groups: Iterable[int]) -> None:
        """Read the state of DeepSpeed's subgroups into new host memory.

        The caller may change it.
        """
        shown = set(groups) - self._buffers.keys()
        for group in shown:
            buffer = self._empty(self._sizes[group])
            self._buffers[group] = _bind(
                self._optimizer, self._rule, self._masters[group], buffer
            )
        for number, part in enumerate(self._slices):
            if part.group in shown:
                self._buffers[part.group][:, part.begin : part.end] = states.read(
                    number
                )

    def write_back(self, states: SubgroupStates) -> None:
        """Write what was changed, and release the host memory."""
        self.collect()
        for number, part in enumerate(self._slices):
            if part.group in self._buffers:
                state = self._buffers[part.group][:, part.begin : part.end]
                # Reading spares a drive what writing would wear.
                if not torch.equal(states.read(number), state):
                    states.write(number, state)
        self.release()

    def release(self) -> None:
        """Release the host memory, whatever was changed."""
        for group in self._buffers:
            _bind(self._optimizer, self._rule, self._masters[group], self._empty(0))
        self._buffers.clear()

    def collect(self) -> None:
        """Take moments by which torch has replaced those that were shown."""
        for group, buffer in self._buffers.items():
            _use_host_buffer(self._optimizer, self._rule, self._masters[group], buffer)

    def _empty(self, elements: int) -> torch.Tensor:
        return torch.empty(
            (len(self._rule.row_names), elements), dtype=torch.float32, device="cpu"
        )


def release_pages(zeros: torch.Tensor) -> None:
    """Give the memory of zeros on the host that is not pinned back to the system until
    something writes to it."""
    if zeros.device.type != "cpu":
        return
    begin, end = zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    if end - first >= mmap.PAGESIZE:
        nbytes = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED
        )


def _use_host_buffer(
    optimizer: Any, rule: UpdateRule, master: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """Make a master and its moments views of a host buffer with their values, and
    return it. New moments are zero.

    The optimizer is the one that DeepSpeed calls, and has the moments; the buffer is
    fp32, (rows, elements).
    """
    if master.data.data_ptr() != buffer[MASTER].data_ptr():
        buffer[MASTER].copy_(master.data)
    state = optimizer.state[master]
    for row, name in enumerate(rule.moments, 1):
        if name not in state:
            buffer[row].zero_()
        elif state[name].data_ptr() != buffer[row].data_ptr():
            buffer[row].copy_(state[name])
    return _bind(optimizer, rule, master, buffer)


def _bind(
    optimizer: Any, rule: UpdateRule, master: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """Make a master and its moments views of a host buffer, whose values they take."""
    master.data = buffer[MASTER]
    master.grad = None
    state = optimizer.state[master]
    for row, name in enumerate(rule.moments, 1):
        state[name] = buffer[row]
    state.setdefault("step", 0)
    return buffer
