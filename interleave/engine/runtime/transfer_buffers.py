"""Host buffers for gradients that are copied to the host and for parameters that are copied to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.plan import Plan


class TransferBuffers:
    """Host buffers of the copies in a plan, pinned unless the plan has the copy as pageable.

    Attributes:
        gradients: Buffers of the gradients, by subgroup.
        params: Buffers of the updated parameters, by subgroup.
        outdated_params: Subgroups whose buffer of parameters has not their values. Only updates of masters as
            remainders read them.
    """

    def __init__(self, subgroups: Sequence[Subgroup], device: Device) -> None:
        self._subgroups = subgroups
        self._device = device
        self.gradients: dict[int, torch.Tensor] = {}
        self.params: dict[int, torch.Tensor] = {}
        self.outdated_params: set[int] = set()
        self._by_kind = {"gradient down": self.gradients, "upload": self.params}
        # (kind, subgroup) of the copies whose buffer is not pinned.
        self._pageable: set[tuple[str, int]] = set()

    @property
    def host_bytes(self) -> int:
        """Host memory of the buffers, in bytes."""
        return sum(buffer.nbytes for buffers in self._by_kind.values() for buffer in buffers.values())

    def prepare(self, plan: Plan) -> None:
        """Allocate the buffers that a plan needs, and drop the others."""
        pageable: set[tuple[str, int]] = {(op.kind, op.subgroup) for op in plan.ops if op.pageable}
        changed = pageable ^ self._pageable
        for kind, buffers in self._by_kind.items():
            needed = {op.subgroup for op in plan.ops if op.kind == kind}
            for subgroup in list(buffers):
                if subgroup not in needed or (kind, subgroup) in changed:
                    del buffers[subgroup]
            for subgroup in needed:
                self._ensure(kind, subgroup, (kind, subgroup) not in pageable)
        self._pageable = pageable

    def ensure_gradient(self, subgroup: int) -> None:
        """Allocate a pinned buffer for the gradient of a subgroup, unless there is a buffer."""
        self._ensure("gradient down", subgroup)

    def ensure_params(self, subgroup: int) -> None:
        """Allocate a pinned buffer for the updated parameters of a subgroup, unless there is a buffer."""
        self._ensure("upload", subgroup)

    def clear(self) -> None:
        """Drop all buffers."""
        for buffers in self._by_kind.values():
            buffers.clear()

    def _ensure(self, kind: str, number: int, pinned: bool = True) -> None:
        subgroup, buffers = self._subgroups[number], self._by_kind[kind]
        if number not in buffers:
            dtype = subgroup.grad_dtype if kind == "gradient down" else subgroup.dtype
            buffers[number] = self._device.allocate_host((subgroup.params,), dtype, pinned)
            if kind == "upload":
                self.outdated_params.add(number)
