"""Performs the operations of a plan on the optimizer state."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ebbtide.interleave.engine.devices.device import Device, copy_now
from ebbtide.interleave.engine.errors import EngineError, UpdateNotStarted
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.rule import UpdateInputs
from ebbtide.interleave.engine.runtime.arena import (
    Arena,
    Block,
    acquired_elements,
    gradient_elements,
)
from ebbtide.interleave.engine.runtime.backing import BackedStates
from ebbtide.interleave.engine.runtime.layout import (
    MASTER,
    ParamSegment,
    Subgroup,
    segment_rows,
    state_rows,
)
from ebbtide.interleave.engine.runtime.speculative import SpeculativeUpdates
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates
from ebbtide.interleave.engine.runtime.transfer_buffers import TransferBuffers
from ebbtide.interleave.engine.runtime.update import Update, UpdatePhase
from ebbtide.interleave.model.kinds import find_kind
from ebbtide.interleave.model.plan import Op, Plan


class ReturnedGradients:
    """The gradients of a step that are on the device again, each until its update, in
    the memory of their parameters or in blocks of their own (see
    `gradient_elements`)."""

    def __init__(
        self, subgroups: Sequence[Subgroup], device: Device, arena: Arena
    ) -> None:
        self._subgroups = subgroups
        self._device = device
        self._arena = arena
        # By subgroup; None for a gradient in the memory of its parameters.
        self._blocks: dict[int, Block | None] = {}

    def __contains__(self, subgroup: int) -> bool:
        """Return whether the gradient of a subgroup is on the device again."""
        return subgroup in self._blocks

    def issue(self, number: int, update: Update, on_host: torch.Tensor) -> None:
        """Issue the copy of a subgroup's gradient to the device."""
        subgroup = self._subgroups[number]
        elements = gradient_elements(subgroup)
        block = self._blocks[number] = self._arena.take(elements) if elements else None
        if block is not None:
            self._device.wait("h2d", block.marks)
        segments = [segment for segment, _ in update.updated_segments(subgroup)]
        pairs = [
            (on_host[segment.span], self.gradient(number, segment, update))
            for segment in segments
        ]
        self._device.copy("h2d", pairs)

    def gradient(
        self, number: int, segment: ParamSegment, update: Update
    ) -> torch.Tensor:
        """Return the elements of a gradient on the device."""
        block = self._blocks[number]
        if block is None:
            return update.value(segment)
        return block.memory.view(self._subgroups[number].grad_dtype)[segment.span]

    def give(self, number: int) -> None:
        """Give the memory of a subgroup's gradient back once its update is issued."""
        block = self._blocks.pop(number, None)
        if block is not None:
            self._arena.give(block, self._device.record("gpu"))

    def release(self) -> None:
        """Give the memory of all gradients back. No operation may run meanwhile."""
        for number in list(self._blocks):
            self.give(number)


@cache
def _load(target: str) -> Any:
    """Return the function `module:name`."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


class Store:
    """Performs operations on the state of subgroups, which it owns.

    For host_buffers and backed see SubgroupStates.
    """

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        device: Device,
        kernel: CpuKernel,
        host_buffers: Sequence[torch.Tensor] | None = None,
        backed: BackedStates | None = None,
    ) -> None:
        self.subgroups = subgroups
        self.device = device
        self._arena = Arena(device)
        self.states = SubgroupStates(
            subgroups, device, self._arena, host_buffers, backed
        )
        self._buffers = TransferBuffers(subgroups, device)
        self._update = Update()
        self.speculative = SpeculativeUpdates(subgroups, self.states, self._buffers)
        self._kernel = kernel
        self._returned = ReturnedGradients(subgroups, device, self._arena)
        # Subgroups whose update writes no half-precision parameter, since a cast
        # follows.
        self._cast_subgroups: set[int] = set()
        self._cpu_share = 1.0
        self._subgroups_of: dict[int, set[int]] = {}
        for number, subgroup in enumerate(subgroups):
            for segment in subgroup.segments:
                self._subgroups_of.setdefault(segment.param, set()).add(number)

    def perform(self, op: Op) -> None:
        """Perform an operation on the CPU, or issue one to a stream of the device."""
        perform = find_kind(op.kind).perform
        if perform is None:
            raise EngineError(
                f"the engine cannot perform {op.kind}: plans with it are for "
                "simulation only"
            )
        _load(perform)(self, op)

    def host_gradient(self, number: int) -> torch.Tensor:
        """Return a subgroup's gradient that was copied to the host this iteration."""
        return self._buffers.gradients[number]

    def return_gradient(self, number: int) -> None:
        """Issue the copy of a gradient back to the device."""
        self._returned.issue(number, self.update, self._buffers.gradients[number])

    def fits(self, op: Op) -> bool:
        """Return whether there is device memory for an operation now."""
        elements = acquired_elements(op, self.subgroups)
        return not elements or self._arena.fits(elements)

    def end(self, op: Op) -> None:
        """Take an operation as done, and release what nobody needs any more."""
        if op.kind == "gradient down":
            self._end_gradient_copy(op.subgroup)
        elif op.kind == "upload":
            self.update.written.add(op.subgroup)
        elif op.kind == "update" and op.resource == "gpu":
            self.update.updated.add(op.subgroup)
            self.update.written.add(op.subgroup)
        if find_kind(op.kind).gives is not None:
            self._arena.trim()

    @property
    def update(self) -> Update:
        """The update that operations work on."""
        return self._update

    @update.setter
    def update(self, update: Update) -> None:
        self._update = update
        self.speculative.begin_step(update)

    def subgroups_of(self, param: int) -> set[int]:
        """Return the subgroups that have elements of a parameter."""
        return self._subgroups_of.get(param, set())

    def gradient(self, param: int, value: torch.Tensor) -> torch.Tensor | None:
        """Return a gradient of this iteration, flat, on the device of the parameter.

        The parameter is `value`; None if there is no gradient.
        """
        gradient = self.update.gradients[param]
        if gradient is not None or not self.subgroups_of(param) <= self.update.copied:
            return gradient
        dtype = self.subgroups[min(self.subgroups_of(param))].grad_dtype
        gradient = torch.empty(value.numel(), dtype=dtype, device=value.device)
        for subgroup in self.subgroups_of(param):
            for segment in self.subgroups[subgroup].segments:
                if segment.param == param:
                    gradient[segment.begin : segment.end] = self._buffers.gradients[
                        subgroup
                    ][segment.span]
        return gradient

    @property
    def host_bytes(self) -> int:
        """Host memory of state and buffers, in bytes."""
        return self.states.host_bytes + self._buffers.host_bytes

    def use_scalars(self) -> set[int]:
        """Use the speculative updates that assumed the factors of the step, which are
        known now.

        Returns the subgroups whose speculative update has assumed others, and must be
        done again.
        """
        for subgroup in self._buffers.params:
            self._refresh_params(subgroup)
        return self.speculative.use_valid(self.update.scalars)

    def forget_params(self, changed: Collection[int]) -> None:
        """Read changed parameters, given by their indices, again before an update on
        the CPU needs them."""
        for param in changed:
            self._buffers.outdated_params |= self.subgroups_of(param)

    def params_on_host(self) -> set[int]:
        """Return the parameters of which the host has a copy for an update."""
        kept = self._buffers.params.keys() - self._buffers.outdated_params
        segments = (self.subgroups[number].segments for number in kept)
        return {segment.param for own in segments for segment in own}

    def _lacks_params(self, number: int) -> bool:
        """Return whether the host lacks parameters that a subgroup's update reads."""
        return (
            self.subgroups[number].rule.reads_params
            and number in self._buffers.outdated_params
        )

    def _refresh_params(self, number: int) -> None:
        """Copy the parameters of a subgroup to the host.

        Do so if updates read them and they are not there.
        """
        if self._lacks_params(number):
            segments, buffer = (
                self.subgroups[number].segments,
                self._buffers.params[number],
            )
            pairs = [
                (self.update.value(segment), buffer[segment.span])
                for segment in segments
            ]
            copy_now(self.device, "d2h", pairs)
            self._buffers.outdated_params.discard(number)

    def apply_placement(
        self, plan: Plan, sizes: Sequence[int], kept_bytes: float = math.inf
    ) -> None:
        """Move state to where a plan has it when an iteration starts.

        Allocate blocks of `block_sizes`.

        No operation may run meanwhile. `kept_bytes` of device memory are free during
        the whole iteration, for state."""
        self._returned.release()
        self.states.apply_placement(plan, sizes, kept_bytes)
        self._cast_subgroups = {op.subgroup for op in plan.ops if op.kind == "cast"}
        self._cpu_share = plan.cpu_share
        self._buffers.prepare(plan)

    def complete(self) -> None:
        """Complete the update on the CPU after an operation failed.

        No state is on the device then.

        Raises EngineError if an update in place failed: its state is lost."""
        # What the job has issued, gradients among it, is done.
        self.device.record("job").synchronize()
        update = self.update
        if unfinished := update.unfinished:
            raise EngineError(
                f"the update of subgroup {min(unfinished)} failed midway: its state is "
                "lost"
            )
        self._returned.release()
        self.states.move_all_to_host()
        self._arena.release()
        # No cast follows the updates below.
        self._cast_subgroups = set()
        for subgroup in range(len(self.subgroups)):
            self.speculative.restore(subgroup)
            if subgroup in update.written and not self.states.is_loaded(subgroup):
                continue
            with self.states.on_host_now(subgroup):
                if subgroup not in update.written:
                    self._complete_subgroup(subgroup)
        # The next plan has pinned ones again.
        self._buffers.clear()

    def _complete_subgroup(self, subgroup: int) -> None:
        """Update a subgroup on the CPU, or only take the parameters from the master,
        and copy its parameters to the device."""
        # It is enough for this step that there is host memory.
        self._buffers.ensure("upload", subgroup, pinned=False)
        self._refresh_params(subgroup)
        if subgroup in self.update.updated:
            self.cast_master(subgroup)
        else:
            if subgroup not in self.update.copied:
                self._buffers.ensure("gradient down", subgroup, pinned=False)
                self.copy_gradient_to_host(subgroup)
                self.device.record("d2h").synchronize()
            self._update_host_state(subgroup)
        self.copy_params_to_device(subgroup)
        self.device.record("h2d").synchronize()

    def release(self) -> None:
        """Release all memory. No operation may run meanwhile."""
        self._returned.release()
        self.states.release()
        self._arena.release()
        self._buffers.clear()

    def flush(self, op: Op) -> None:
        """Issue the copy of the state of a subgroup to the host."""
        if op.subgroup not in self.states.on_device:
            raise EngineError(
                f"the plan flushes subgroup {op.subgroup}, which is not on the device"
            )
        self.states.issue_to_host(op.subgroup)

    def update_on_cpu(self, op: Op) -> None:
        """Update a subgroup on the host, beside its state if that is speculative."""
        assumed = None if self._lacks_params(op.subgroup) else self.update.assumed
        if not (op.is_speculative and self.speculative.begin(op.subgroup, assumed)):
            self._update_host_state(op.subgroup)
        elif assumed is not None:
            self._speculate(op.subgroup)
            self.speculative.end(op.subgroup)

    def _host_rows(
        self, number: int, state: torch.Tensor, params: torch.Tensor
    ) -> UpdateInputs:
        """Return what an update of a state on the host takes. Where a cast follows,
        that writes the parameters."""
        own = self.subgroups[number]
        inputs = own.rule.inputs(state_rows(state, own), params)
        is_cast = number in self._cast_subgroups and not own.rule.reads_params
        return inputs._replace(out=None) if is_cast else inputs

    def _speculate(self, subgroup: int) -> None:
        gradient, params = (
            self._buffers.gradients[subgroup],
            self._buffers.params[subgroup],
        )
        rows, out, rule = self._host_rows(
            subgroup, self.states.on_host[subgroup], params
        )
        ranges = self.update.ranges(self.subgroups[subgroup], is_speculative=True)
        spare = self.speculative.spare(subgroup)
        if spare is None:
            self._kernel.update_ranges(
                gradient, rows, out, ranges, self._cpu_share, rule
            )
            return
        spare_params = self._buffers.spare_params.get(subgroup, params)
        if rule.split is not None:
            # Both parts are updated where they are.
            spare_params.copy_(params)
        new_rows, out, _ = self._host_rows(subgroup, spare, spare_params)
        self._kernel.update_beside(
            gradient, rows, new_rows, out, ranges, self._cpu_share, rule
        )

    def _update_host_state(self, subgroup: int) -> None:
        gradient, own = self._buffers.gradients[subgroup], self.subgroups[subgroup]
        self._refresh_params(subgroup)
        state, params = self.states.on_host[subgroup], self._buffers.params[subgroup]
        rows, out, rule = self._host_rows(subgroup, state, params)
        update = self.update
        update.unfinished.add(subgroup)
        self._kernel.update_ranges(
            gradient, rows, out, update.ranges(own), self._cpu_share, rule
        )
        update.unfinished.discard(subgroup)
        update.updated.add(subgroup)

    def update_on_gpu(self, op: Op) -> None:
        """Issue the update of a subgroup on the device."""
        subgroup = self.subgroups[op.subgroup]
        rows = state_rows(self.states.on_device[op.subgroup], subgroup)
        is_returned = op.subgroup in self._returned
        update, updates = self.update, []
        for segment, scalars in update.updated_segments(subgroup):
            own = (
                self._returned.gradient(op.subgroup, segment, update)
                if is_returned
                else update.gradient(segment)
            )
            value = update.value(segment)
            state, _, rule = subgroup.rule.inputs(
                segment_rows(rows, subgroup, segment), value
            )
            updates.append(
                TensorUpdate(
                    own, state, value, scalars, rule, segment.position, segment.shape
                )
            )
        update.unfinished.add(op.subgroup)
        try:
            self.device.update(updates)
        except UpdateNotStarted:
            update.unfinished.discard(op.subgroup)
            raise
        update.unfinished.discard(op.subgroup)
        self._returned.give(op.subgroup)

    def cast_master(self, subgroup: int) -> None:
        """Convert the masters of a subgroup on the host to parameters."""
        if self.subgroups[subgroup].rule.reads_params:
            # The update has written the parameters.
            return
        masters = state_rows(self.states.on_host[subgroup], self.subgroups[subgroup])[
            MASTER
        ]
        params = self._buffers.params[subgroup]
        params.copy_(masters)
        if params.dtype != torch.float32:
            # The NaN of torch's cast differs between machines, and from the updates'
            # NaN.
            params.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)

    def copy_gradient_to_host(self, subgroup: int) -> None:
        """Issue the copy of the gradient of a subgroup to the host."""
        buffer, update = self._buffers.gradients[subgroup], self.update
        self.device.copy(
            "d2h",
            [
                (update.gradient(segment), buffer[segment.span])
                for segment in self._with_gradient(subgroup)
            ],
        )

    def use_gradients(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        """Take the gradients (flat) of a step, of which some may be on the host.

        Return the subgroups whose copies there are not of these gradients. No operation
        may run meanwhile.
        """
        update = self.update
        update.gradients = [
            gradients.get(param) for param in range(len(update.gradients))
        ]
        copied = [
            (number, segment)
            for number in update.copies
            for segment in self._with_gradient(number)
        ]
        values = [update.gradient(segment) for _, segment in copied]
        current = self.device.fingerprint(values)() if values else []
        stale = {
            number
            for (number, segment), own in zip(copied, current, strict=True)
            if update.copies[number].get(segment.param) != own
        }
        if update.copies:
            update.stale_share = len(stale) / len(update.copies)
        update.copied -= stale
        self.speculative.invalidate(stale)
        return stale

    def _with_gradient(self, subgroup: int) -> list[ParamSegment]:
        """Return the segments of a subgroup that have a gradient on the device."""
        gradients = self.update.gradients
        segments = self.subgroups[subgroup].segments
        return [one for one in segments if gradients[one.param] is not None]

    def _end_gradient_copy(self, subgroup: int) -> None:
        """Drop the gradients that are on the host now.

        Keep them if the job holds them until the step, which has begun; before that the
        job may change them, and the fingerprint of the copy tells at the step.
        """
        update = self.update
        update.copied.add(subgroup)
        if not update.streamed and update.phase is UpdatePhase.OPEN:
            segments = self._with_gradient(subgroup)
            buffer = self._buffers.gradients[subgroup]
            own = self._kernel.fingerprints([buffer[one.span] for one in segments])
            params = [segment.param for segment in segments]
            update.copies[subgroup] = dict(zip(params, own, strict=True))
        elif not update.streamed:
            return
        for segment in self.subgroups[subgroup].segments:
            if self._subgroups_of[segment.param] <= update.copied:
                update.gradients[segment.param] = None

    def copy_params_to_device(self, subgroup: int) -> None:
        """Issue the copy of the parameters of a subgroup to the device."""
        buffer, update = self._buffers.params[subgroup], self.update
        segments = update.updated_segments(self.subgroups[subgroup])
        self.device.copy(
            "h2d",
            [(buffer[segment.span], update.value(segment)) for segment, _ in segments],
        )
