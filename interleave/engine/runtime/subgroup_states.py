"""The state of each subgroup, and its placement on the host and the device."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.devices.device import Device, copy_now
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.runtime.arena import Arena, Block
from ebbtide.interleave.engine.runtime.backing import BackedStates
from ebbtide.interleave.engine.runtime.layout import (
    MASTER,
    ParamSegment,
    Subgroup,
    segment_rows,
    state_elements,
    state_rows,
    state_shape,
)
from ebbtide.interleave.model.plan import Plan


class SubgroupStates:
    """The optimizer state of each subgroup, of `state_shape`.

    A state is master or remainder, and moments. It is on the host, on the device, or on
    both while it is copied or where the device's state is the newer one; or behind the
    host's memory (`backed`), and in a buffer between its read and its write.
    `host_buffers` of the caller have the state again after `move_all_to_host`.
    """

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        device: Device,
        arena: Arena,
        host_buffers: Sequence[torch.Tensor] | None = None,
        backed: BackedStates | None = None,
    ) -> None:
        self.subgroups = subgroups
        self.backed = backed or BackedStates()
        self._device = device
        self._arena = arena
        self._blocks: dict[int, Block] = {}
        # The plan for which the arena holds blocks.
        self._plan: Plan | None = None
        self.on_host: dict[int, torch.Tensor] = dict(enumerate(host_buffers or ()))
        self._host_buffers = host_buffers
        # Host memory for the new state of a speculative update, while the old one is
        # still needed.
        self.spares: dict[int, torch.Tensor] = {}
        # Newer than the state on the host.
        self.on_device: dict[int, torch.Tensor] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory of the states, in bytes."""
        own = [
            state
            for subgroup, state in self.on_host.items()
            if not self.is_backed(subgroup)
        ]
        nbytes: int = self.backed.host_bytes + sum(
            state.nbytes for state in (*own, *self.spares.values())
        )
        return nbytes

    @property
    def storage_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to storage so far."""
        return self.backed.read_bytes, self.backed.written_bytes

    def named_rows(self) -> list[tuple[str, torch.Tensor]]:
        """Return the rows of all states by name.

        The rows of a state that is not in memory are on the device `meta`.
        """
        rows: list[tuple[str, torch.Tensor]] = []
        for number, subgroup in enumerate(self.subgroups):
            state = self.on_device.get(number, self.on_host.get(number))
            if state is None:
                state = torch.empty(
                    state_shape(subgroup), dtype=torch.float32, device="meta"
                )
            rows += zip(
                subgroup.rule.row_names, state_rows(state, subgroup), strict=True
            )
        return rows

    def read(self, subgroup: int) -> torch.Tensor:
        """Return the state of a subgroup, on the host. The caller must not write to
        it."""
        if subgroup not in self.on_device:
            return (
                self.on_host[subgroup]
                if subgroup in self.on_host
                else self.backed.read(subgroup)
            )
        state = torch.empty(
            state_shape(self.subgroups[subgroup]), dtype=torch.float32, device="cpu"
        )
        copy_now(self._device, "d2h", [(self.on_device[subgroup], state)])
        return state

    def write(self, subgroup: int, state: torch.Tensor) -> None:
        """Set the state of a subgroup, on the host or the device."""
        if subgroup in self.on_device:
            copy_now(self._device, "h2d", [(state, self.on_device[subgroup])])
        elif self.is_backed(subgroup):
            self.backed.write(subgroup, state)
        else:
            self._allocated_on_host(subgroup).copy_(state)

    def copy_parts(
        self,
        subgroup: int,
        parts: Sequence[tuple[ParamSegment, Sequence[torch.Tensor]]],
    ) -> None:
        """Copy segments of all rows of a state to host tensors, one for each row."""
        on_device, own = self.on_device.get(subgroup), self.subgroups[subgroup]
        rows = state_rows(self.read(subgroup) if on_device is None else on_device, own)
        pairs = [
            pair
            for part, targets in parts
            for pair in zip(segment_rows(rows, own, part), targets, strict=True)
        ]
        if on_device is not None:
            copy_now(self._device, "d2h", pairs)
            return
        for source, target in pairs:
            target.copy_(source)

    @contextmanager
    def edited_masters(
        self, subgroup: int, spans: Sequence[slice]
    ) -> Iterator[list[torch.Tensor]]:
        """Provide some masters or remainders of a subgroup on the host, to change them.
        No operation may run."""
        on_device = self.on_device.get(subgroup)
        state = self.read(subgroup) if on_device is None else on_device
        parts = [
            state_rows(state, self.subgroups[subgroup])[MASTER][span] for span in spans
        ]
        if on_device is not None:
            edited = [torch.empty_like(part, device="cpu") for part in parts]
            copy_now(self._device, "d2h", list(zip(parts, edited, strict=True)))
            yield edited
            copy_now(self._device, "h2d", list(zip(edited, parts, strict=True)))
            return
        yield parts
        if self.is_backed(subgroup):
            # Also where the state is in a buffer: it may be read again.
            self.backed.write(subgroup, state)

    def is_backed(self, subgroup: int) -> bool:
        """Return whether the plan has a subgroup's state behind the host's memory."""
        return self.backed.is_planned(subgroup)

    def is_loaded(self, subgroup: int) -> bool:
        """Return whether a state that is behind the host's memory is in a buffer."""
        return self.is_backed(subgroup) and subgroup in self.on_host

    def load(self, subgroup: int, buffer: int) -> None:
        """Read a state that is behind the host's memory into a buffer of the plan."""
        self.on_host[subgroup] = self.backed.load(subgroup, buffer)

    def save(self, subgroup: int) -> None:
        """Write the state in a buffer back."""
        self.backed.save(subgroup)
        del self.on_host[subgroup]

    def unload(self) -> None:
        """Forget what is in the buffers. No operation may run meanwhile, and none has
        changed it but in vain."""
        for subgroup in [
            subgroup for subgroup in self.on_host if self.is_backed(subgroup)
        ]:
            del self.on_host[subgroup]

    def reload(self, subgroup: int) -> None:
        """Read the state in a buffer again."""
        self.backed.reload(subgroup)

    @contextmanager
    def on_host_now(self, subgroup: int) -> Iterator[torch.Tensor]:
        """Provide the host memory of a state.

        A state behind the host's memory is read before and written after.
        """
        if subgroup not in self.on_host:
            self.on_host[subgroup] = self.backed.read(subgroup)
        yield self.on_host[subgroup]
        if self.is_backed(subgroup):
            self.backed.write(subgroup, self.on_host.pop(subgroup))

    def use_spare(self, subgroup: int) -> None:
        """Take the state in the spare as a subgroup's state.

        The memory of the old state is the spare from now on.
        """
        self.on_host[subgroup], self.spares[subgroup] = (
            self.spares[subgroup],
            self.on_host[subgroup],
        )

    def move_all_to_host(self) -> None:
        """Move all state to the host. No operation may run meanwhile."""
        self._plan = None
        self._move(self.on_device.keys(), self._issue_to_any_host_memory)
        for subgroup, buffer in enumerate(self._host_buffers or ()):
            if self.on_host[subgroup] is not buffer:
                self.use_spare(subgroup)
                buffer.copy_(self.spares[subgroup])

    def apply_placement(
        self, plan: Plan, sizes: Sequence[int], kept_bytes: float
    ) -> None:
        """Move state to where a plan has it at first.

        Blocks are as for `Arena.reserve`. No operation may run.
        """
        # Resident state has blocks of its size. Other blocks are used by one subgroup
        # after the other.
        staying = {
            subgroup
            for subgroup in plan.resident & self.on_device.keys()
            if self._blocks[subgroup].elements
            == state_elements(self.subgroups[subgroup])
        }
        is_placed = (
            staying == plan.resident
            and self.on_device.keys() == plan.resident | plan.parked
        )
        self.unload()
        if plan is self._plan and is_placed:
            return
        self._plan = None
        self._move(self.on_device.keys() - staying, self.issue_to_host)
        self._follow_backing(plan)
        resident = [
            state_elements(self.subgroups[subgroup])
            for subgroup in sorted(plan.resident - staying)
        ]
        self._arena.reserve([*resident, *sizes], kept_bytes)
        # Resident state first, while there are blocks of its exact size.
        self._move(plan.resident - staying, self.issue_to_device)
        self._move(plan.parked, self.issue_to_device)
        self._allocate_on_host(plan)
        self._plan = plan

    def _follow_backing(self, plan: Plan) -> None:
        """Move states between host memory and what is behind it as a plan has them."""
        self.backed.prepare(plan)
        for subgroup in range(len(self.subgroups)):
            if subgroup in self.on_host and self.is_backed(subgroup):
                self.backed.move_in(subgroup, self.on_host.pop(subgroup))
        for subgroup in range(len(self.subgroups)):
            if self.backed.has(subgroup) and not self.is_backed(subgroup):
                self.backed.move_out(subgroup, self._allocated_on_host(subgroup))

    def issue_to_device(self, subgroup: int) -> None:
        """Issue the move of a state from the host to the device."""
        host = self.on_host[subgroup]
        block = self._arena.take(state_elements(self.subgroups[subgroup]))
        state = block.memory[: host.numel()].view(host.shape)
        try:
            self._device.wait("h2d", block.marks)
            self._device.copy("h2d", _row_pairs(host, state))
        except BaseException:
            self._arena.give(block, self._device.record("h2d"))
            raise
        self.on_device[subgroup], self._blocks[subgroup] = state, block

    def issue_to_host(self, subgroup: int) -> None:
        """Issue the move of a state from the device to the host."""
        self._device.copy(
            "d2h",
            _row_pairs(self.on_device[subgroup], self._allocated_on_host(subgroup)),
        )
        del self.on_device[subgroup]
        self._arena.give(self._blocks.pop(subgroup), self._device.record("d2h"))

    def _issue_to_any_host_memory(self, subgroup: int) -> None:
        """Issue the move of a state to the host, also where no more host memory can be
        pinned."""
        try:
            self._allocated_on_host(subgroup)
        except EngineError:
            self.on_host[subgroup] = self._allocate(subgroup, pinned=False)
        self.issue_to_host(subgroup)

    def release(self) -> None:
        """Release all memory. No operation may run meanwhile."""
        for block in self._blocks.values():
            self._arena.give(block, self._device.record("d2h"))
        self._blocks.clear()
        self.on_device.clear()
        self.on_host.clear()
        self.spares.clear()
        self.backed.close()

    def _move(self, subgroups: Collection[int], issue: Callable[[int], None]) -> None:
        """Move states, and return when they have moved, even if one cannot."""
        try:
            for subgroup in sorted(subgroups):
                issue(subgroup)
        finally:
            for direction in ("h2d", "d2h"):
                self._device.record(direction).synchronize()

    def _allocate_on_host(self, plan: Plan) -> None:
        """Allocate host memory for the states that a plan has there at some time.

        Release the memory of the other states.
        """
        for subgroup in () if self._host_buffers is not None else plan.resident:
            self.on_host.pop(subgroup, None)
        needed = {
            subgroup for subgroup in plan.speculated if not self.is_backed(subgroup)
        }
        self.spares = {
            subgroup: spare
            for subgroup, spare in self.spares.items()
            if subgroup in needed
        }
        for subgroup in range(len(self.subgroups)):
            if subgroup not in plan.resident and not self.is_backed(subgroup):
                self._allocated_on_host(subgroup)
        # Of state behind the host the old version is there.
        for subgroup in needed - self.spares.keys():
            self.spares[subgroup] = self._allocate(subgroup)

    def _allocated_on_host(self, subgroup: int) -> torch.Tensor:
        if subgroup not in self.on_host:
            self.on_host[subgroup] = self._allocate(subgroup)
        return self.on_host[subgroup]

    def _allocate(self, subgroup: int, pinned: bool = True) -> torch.Tensor:
        shape = state_shape(self.subgroups[subgroup])
        if len(shape) == 1:
            return self._device.allocate_host(shape, torch.float32, pinned)
        rows, params = shape
        return self._device.allocate_host(
            (rows, row_stride(params)), torch.float32, pinned
        )[:, :params]


def _row_pairs(
    source: torch.Tensor, target: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows to copy, one by one.

    Host buffers of the caller may be parts of longer rows.
    """
    if source.dim() == 1:
        return [(source, target)]
    return list(zip(source, target, strict=True))
