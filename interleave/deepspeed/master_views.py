"""Host memory of DeepSpeed's masters and moments: all the time, or only while something reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from ebbtide.interleave.deepspeed.host_buffers import bind, use_host_buffer
from ebbtide.interleave.deepspeed.subgroup_slices import SubgroupSlice
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates


class MasterViews(Protocol):
    """Makes DeepSpeed's masters and moments those of the engine. No operation may run during any call."""

    @property
    def slice_buffers(self) -> Sequence[torch.Tensor] | None:
        """Host memory for the state of each slice; None: the engine has its own."""

    def show(self, states: SubgroupStates, groups: Iterable[int]) -> None:
        """Give the masters and moments of DeepSpeed's subgroups their values, which the caller may change."""

    def write_back(self, states: SubgroupStates) -> None:
        """Take changes of masters and moments, before the plan starts again."""

    def release(self) -> None:
        """Release the memory of `show`, whatever was changed."""

    def collect(self) -> None:
        """Take moments by which torch has replaced those that were shown."""


class HeldMasters:
    """Masters and moments that are views of host buffers, in which the engine keeps its state.

    Args:
        optimizer: The optimizer that DeepSpeed calls, which has the moments.
        masters: The masters.
        slices: The slices of DeepSpeed's subgroups.
        device: Allocates the buffers.
    """

    def __init__(
        self, optimizer: Any, masters: Sequence[torch.Tensor], slices: Sequence[SubgroupSlice], device: Device
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._buffers = [
            use_host_buffer(optimizer, master, device.allocate_host((3, master.numel()), torch.float32))
            for master in masters
        ]
        self.slice_buffers = [self._buffers[part.group][:, part.begin : part.end] for part in slices]

    def show(self, states: SubgroupStates, groups: Iterable[int]) -> None:
        """Move all state to the host."""
        states.move_all_to_host()

    def write_back(self, states: SubgroupStates) -> None:
        """Do nothing: changes were made to the engine's state itself."""

    def release(self) -> None:
        """Do nothing: the memory is the engine's."""

    def collect(self) -> None:
        """Copy moments that are not in the buffers to them."""
        for master, buffer in zip(self._masters, self._buffers, strict=True):
            use_host_buffer(self._optimizer, master, buffer)


class StoredMasters:
    """Masters and moments without elements, which have host memory only from `show` to `write_back`.

    Args:
        optimizer: The optimizer that DeepSpeed calls, which has the moments.
        masters: The masters, without elements.
        sizes: Elements of each master while it is shown.
        slices: The slices of DeepSpeed's subgroups.
    """

    slice_buffers = None

    def __init__(
        self, optimizer: Any, masters: Sequence[torch.Tensor], sizes: Sequence[int], slices: Sequence[SubgroupSlice]
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._sizes = sizes
        self._slices = slices
        # Of the groups that are shown.
        self._buffers: dict[int, torch.Tensor] = {}
        for master in masters:
            bind(optimizer, master, _empty(0))

    def show(self, states: SubgroupStates, groups: Iterable[int]) -> None:
        """Read the state of groups into new host memory."""
        shown = set(groups) - self._buffers.keys()
        for group in shown:
            self._buffers[group] = bind(self._optimizer, self._masters[group], _empty(self._sizes[group]))
        for number, part in enumerate(self._slices):
            if part.group in shown:
                self._buffers[part.group][:, part.begin : part.end] = states.read(number)

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
            bind(self._optimizer, self._masters[group], _empty(0))
        self._buffers.clear()

    def collect(self) -> None:
        """Copy moments that are not in the memory of `show` to it."""
        for group, buffer in self._buffers.items():
            use_host_buffer(self._optimizer, self._masters[group], buffer)


def _empty(elements: int) -> torch.Tensor:
    return torch.empty((3, elements), dtype=torch.float32, device="cpu")
