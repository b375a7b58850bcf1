"""The optimizer state of each subgroup, and its placement on the host and the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.plan import Plan

# Rows of a subgroup's state, in the order of ParamState.
MASTER, EXP_AVG, EXP_AVG_SQ = range(3)


class SubgroupStates:
    """The state of each subgroup, (3, params) fp32: master, exp_avg, exp_avg_sq.

    A state is on the host, on the device, or on both while it is copied or where the device's is the newer one.

    Args:
        subgroups: The subgroups.
        device: The device.
        host_buffers: Host memory of the caller for each state, which has the state again after `move_all_to_host`. None
            to allocate host memory for every state that is not resident on the device.

    Attributes:
        subgroups: The subgroups.
    """

    def __init__(
        self, subgroups: Sequence[Subgroup], device: Device, host_buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.subgroups = subgroups
        self._device = device
        self._on_host: dict[int, torch.Tensor] = dict(enumerate(host_buffers or ()))
        self._keeps_host_buffers = host_buffers is not None
        # Newer than the state on the host.
        self._on_device: dict[int, torch.Tensor] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory of the states, in bytes."""
        return sum(state.nbytes for state in self._on_host.values())

    def read(self, subgroup: int) -> torch.Tensor:
        """Return the state of a subgroup, on the host. The caller must not write to it."""
        if subgroup not in self._on_device:
            return self._on_host[subgroup]
        state = torch.empty((3, self.subgroups[subgroup].params), dtype=torch.float32, device="cpu")
        self._device.copy("d2h", [(self._on_device[subgroup], state)])
        return state

    def write(self, subgroup: int, state: torch.Tensor) -> None:
        """Set the state of a subgroup, on the host or the device."""
        if subgroup in self._on_device:
            self._device.copy("h2d", [(state, self._on_device[subgroup])])
        else:
            self._allocated_on_host(subgroup).copy_(state)

    def read_master(self, subgroup: int) -> torch.Tensor:
        """Return the masters of a subgroup, on the host. Changes take effect with `write_master`."""
        if subgroup not in self._on_device:
            return self._on_host[subgroup][MASTER]
        master = torch.empty(self.subgroups[subgroup].params, dtype=torch.float32, device="cpu")
        self._device.copy("d2h", [(self._on_device[subgroup][MASTER], master)])
        return master

    def write_master(self, subgroup: int, master: torch.Tensor) -> None:
        """Set the masters of a subgroup to those of `read_master` with changes. No operation may run meanwhile."""
        if subgroup in self._on_device:
            self._device.copy("h2d", [(master, self._on_device[subgroup][MASTER])])

    def on_host(self, subgroup: int) -> torch.Tensor:
        """Return the host memory of a state."""
        return self._on_host[subgroup]

    def on_device(self, subgroup: int) -> torch.Tensor:
        """Return the device memory of a state."""
        return self._on_device[subgroup]

    def is_on_device(self, subgroup: int) -> bool:
        """Return whether the newest state of a subgroup is on the device."""
        return subgroup in self._on_device

    def move_all_to_host(self) -> None:
        """Move all state to the host. No operation may run meanwhile."""
        for subgroup in sorted(self._on_device):
            self.move_to_host(subgroup)

    def apply_placement(self, plan: Plan) -> None:
        """Move state to where a plan has it when an iteration starts. No operation may run meanwhile."""
        on_device = plan.resident | plan.parked
        for subgroup in sorted(self._on_device.keys() - on_device):
            self.move_to_host(subgroup)
        for subgroup in sorted(on_device - self._on_device.keys()):
            self.move_to_device(subgroup)
        for subgroup in () if self._keeps_host_buffers else plan.resident:
            self._on_host.pop(subgroup, None)
        for subgroup in range(len(self.subgroups)):
            if subgroup not in plan.resident:
                self._allocated_on_host(subgroup)

    def move_to_device(self, subgroup: int) -> None:
        """Move a state from the host to the device."""
        block = self._device.allocate_state(self.subgroups[subgroup].params)
        try:
            self._device.copy("h2d", _row_pairs(self._on_host[subgroup], block))
        except BaseException:
            self._device.release(block)
            raise
        self._on_device[subgroup] = block

    def move_to_host(self, subgroup: int) -> None:
        """Move a state from the device to the host."""
        self._device.copy("d2h", _row_pairs(self._on_device[subgroup], self._allocated_on_host(subgroup)))
        self._device.release(self._on_device.pop(subgroup))

    def release(self) -> None:
        """Release all memory."""
        for block in self._on_device.values():
            self._device.release(block)
        self._on_device.clear()
        self._on_host.clear()

    def _allocated_on_host(self, subgroup: int) -> torch.Tensor:
        if subgroup not in self._on_host:
            shape = (3, self.subgroups[subgroup].params)
            self._on_host[subgroup] = self._device.allocate_host(shape, torch.float32)
        return self._on_host[subgroup]


def _row_pairs(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows to copy, one by one: host buffers of the caller may be parts of longer rows."""
    return list(zip(source, target, strict=True))
