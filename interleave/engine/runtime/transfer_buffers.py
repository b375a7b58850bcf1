"""Host buffers of the copies of gradients and parameters."""

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.plan import Plan


class TransferBuffers:
    """Host buffers of the copies in a plan, pinned unless the plan has the copy as
    pageable."""

    def __init__(self, subgroups: Sequence[Subgroup], device: Device) -> None:
        self._subgroups = subgroups
        self._device = device
        # Of gradients and of updated parameters, by subgroup.
        self.gradients: dict[int, torch.Tensor] = {}
        self.params: dict[int, torch.Tensor] = {}
        # Memory for the new parameters of a speculative update that reads the old ones.
        self.spare_params: dict[int, torch.Tensor] = {}
        # Subgroups whose buffer of parameters has not their values, which some updates
        # read.
        self.outdated_params: set[int] = set()
        self._by_kind = {"gradient down": self.gradients, "upload": self.params}
        # (kind, subgroup) of the copies whose buffer is not pinned.
        self._pageable: set[tuple[str, int]] = set()

    @property
    def host_bytes(self) -> int:
        """Host memory of the buffers, in bytes."""
        every = (*self._by_kind.values(), self.spare_params)
        return sum(buffer.nbytes for buffers in every for buffer in buffers.values())

    def prepare(self, plan: Plan) -> None:
        """Allocate the buffers that a plan needs, and drop the others."""
        pageable: set[tuple[str, int]] = {
            (op.kind, op.subgroup) for op in plan.ops if op.pageable
        }
        changed = pageable ^ self._pageable
        for kind, buffers in self._by_kind.items():
            needed = {op.subgroup for op in plan.ops if op.kind == kind}
            for subgroup in list(buffers):
                if subgroup not in needed or (kind, subgroup) in changed:
                    del buffers[subgroup]
            for subgroup in needed:
                self.ensure(kind, subgroup, (kind, subgroup) not in pageable)
        self._pageable = pageable
        speculated = {
            number
            for number in plan.speculated
            if self._subgroups[number].rule.reads_params
        }
        self.spare_params = {
            number: self.spare_params[number]
            if number in self.spare_params
            else self._new_params(number)
            for number in speculated - plan.stored
        }

    def use_spare(self, number: int) -> None:
        """Take the parameters in the spare as a subgroup's, if there is one."""
        if number in self.spare_params:
            self.params[number], self.spare_params[number] = (
                self.spare_params[number],
                self.params[number],
            )

    def _new_params(self, number: int, pinned: bool = True) -> torch.Tensor:
        subgroup = self._subgroups[number]
        return self._device.allocate_host((subgroup.params,), subgroup.dtype, pinned)

    def ensure(self, kind: str, number: int, pinned: bool = True) -> None:
        """Allocate the buffer of a copy of this kind for a subgroup.

        Do nothing if there is one.
        """
        subgroup, buffers = self._subgroups[number], self._by_kind[kind]
        if number in buffers:
            return
        if kind == "upload":
            buffers[number] = self._new_params(number, pinned)
            self.outdated_params.add(number)
        else:
            buffers[number] = self._device.allocate_host(
                (subgroup.params,), subgroup.grad_dtype, pinned
            )

    def clear(self) -> None:
        for buffers in (*self._by_kind.values(), self.spare_params):
            buffers.clear()
