"""Where the optimizer's state is, and how each operation of a plan works on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.layout import Piece, Subgroup
from ebbtide.interleave.model.plan import Op, Plan

# Rows of a subgroup's state.
MASTER, EXP_AVG, EXP_AVG_SQ = range(3)


@dataclass
class Inputs:
    """What a step works with, by parameter. values, gradients: flat, on the device, of the parameter's dtype; None
    where there is no gradient. scalars: None for a parameter that this step leaves alone. marks: what waits until a
    gradient is made. streams: a gradient that has come down is let go on the device."""

    values: list[torch.Tensor]
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    scalars: list[Scalars | None] = field(default_factory=list)
    marks: dict[int, Callable[[], None]] = field(default_factory=dict)
    streams: bool = False


class Store:
    """State of each subgroup, (3, params) fp32: master, exp_avg, exp_avg_sq; on the host, on the device, or on both
    where a copy is under way or the device's is the newer one. homes: somebody's host memory for it, in which it is
    again after `bring_home`; without them it takes host memory of its own, as far as it is not resident."""

    def __init__(
        self,
        subgroups: Sequence[Subgroup],
        device: Device,
        kernel: CpuKernel,
        homes: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.subgroups = subgroups
        self.device = device
        self._inputs = Inputs([])
        self._kernel = kernel
        self._host: dict[int, torch.Tensor] = dict(enumerate(homes or ()))
        self._keeps_homes = homes is not None
        # Newer than the host's.
        self._on_device: dict[int, torch.Tensor] = {}
        # Whose update has begun and not ended: if that raises nobody knows what it has changed.
        self._torn: set[int] = set()
        self._down: dict[int, torch.Tensor] = {}
        # Whose gradient has come back up. It lies where the parameter is, which nobody reads until the update has
        # written it anew from the master: so it takes no room. One of another dtype lies in room of its own.
        self._up: set[int] = set()
        self._beside: dict[int, torch.Tensor] = {}
        self._out: dict[int, torch.Tensor] = {}
        self._held: dict[str, dict[int, torch.Tensor]] = {"gradient down": self._down, "upload": self._out}
        # Whose update writes no half precision, since a cast follows.
        self._casts: set[int] = set()
        # Whose gradient has come down since the iteration began.
        self._came_down: set[int] = set()
        self._subgroups_of: dict[int, set[int]] = {}
        for number, of in enumerate(subgroups):
            for piece in of.pieces:
                self._subgroups_of.setdefault(piece.param, set()).add(number)
        # Copies by kind and subgroup whose buffer is not pinned.
        self._pageable: set[tuple[str, int]] = set()
        self._perform: dict[tuple[str, str], Callable[[Op], None]] = {
            ("gradient down", "d2h"): self._gradient_down,
            ("gradient up", "h2d"): self._gradient_up,
            ("fetch", "h2d"): self._fetch,
            ("flush", "d2h"): self._flush,
            ("update", "cpu"): self._update_on_cpu,
            ("update", "gpu"): self._update_on_gpu,
            ("cast", "cpu"): self._cast,
            ("upload", "h2d"): self._upload,
            # All gradients have come down; the factor is in the scalars already.
            ("clip", "cpu"): lambda op: None,
        }

    def perform(self, op: Op) -> None:
        """Do an operation; returns when it is done."""
        self._perform[op.kind, op.resource](op)

    @property
    def inputs(self) -> Inputs:
        """What operations work with."""
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._came_down.clear()

    def subgroups_of(self, param: int) -> set[int]:
        """The subgroups that a parameter has elements in."""
        return self._subgroups_of.get(param, set())

    def gradient(self, param: int, like: torch.Tensor) -> torch.Tensor | None:
        """A gradient of this iteration, flat, from where it is now; like: its parameter. None where there is none."""
        found = self._inputs.gradients[param]
        if found is not None or not self.subgroups_of(param) <= self._came_down:
            return found
        dtype = self.subgroups[min(self.subgroups_of(param))].grad_dtype
        found = torch.empty(like.numel(), dtype=dtype, device=like.device)
        for subgroup in self.subgroups_of(param):
            for piece in self.subgroups[subgroup].pieces:
                if piece.param == param:
                    found[piece.begin : piece.end] = self._down[subgroup][piece.at : _end(piece)]
        return found

    @property
    def host_bytes(self) -> int:
        """Host memory taken: state and buffers."""
        return sum(block.nbytes for held in (self._host, self._down, self._out) for block in held.values())

    def read(self, subgroup: int) -> torch.Tensor:
        """The state of a subgroup, on the host. Not to be written."""
        if subgroup not in self._on_device:
            return self._host[subgroup]
        found = torch.empty((3, self.subgroups[subgroup].params), dtype=torch.float32, device="cpu")
        self.device.copy("d2h", [(self._on_device[subgroup], found)])
        return found

    def write(self, subgroup: int, state: torch.Tensor) -> None:
        """Set the state of a subgroup, wherever it is."""
        if subgroup in self._on_device:
            self.device.copy("h2d", [(state, self._on_device[subgroup])])
        else:
            self._host_of(subgroup).copy_(state)

    def bring_home(self) -> None:
        """All state is on the host; nothing runs meanwhile."""
        for subgroup in sorted(self._on_device):
            self._bring_back(subgroup)

    def settle(self, plan: Plan) -> None:
        """Bring state to where the plan has it when an iteration starts; nothing runs meanwhile."""
        home = plan.resident | plan.parked
        for subgroup in sorted(self._on_device.keys() - home):
            self._bring_back(subgroup)
        for subgroup in sorted(home - self._on_device.keys()):
            self._come(subgroup)
        for subgroup in () if self._keeps_homes else plan.resident:
            self._host.pop(subgroup, None)
        for subgroup in range(len(self.subgroups)):
            if subgroup not in plan.resident:
                self._host_of(subgroup)
        self._casts = {op.subgroup for op in plan.ops if op.kind == "cast"}
        pageable: set[tuple[str, int]] = {(op.kind, op.subgroup) for op in plan.ops if op.pageable}
        changed = pageable ^ self._pageable
        for kind, held in self._held.items():
            needed = {op.subgroup for op in plan.ops if op.kind == kind}
            for subgroup in list(held):
                if subgroup not in needed or (kind, subgroup) in changed:
                    del held[subgroup]
            for subgroup in needed:
                self._buffer(kind, subgroup, (kind, subgroup) not in pageable)
        self._pageable = pageable

    def complete(self, plan: Plan, done: Sequence[bool]) -> None:
        """After some operations of a plan could not be done: do the rest of the step on the CPU, one after the other.
        Afterwards no state is on the device. Raises EngineError where it was an update that broke off."""
        if self._torn:
            raise EngineError(f"the update of subgroup {min(self._torn)} broke off: its state is lost")
        updated = {op.subgroup for op, is_done in zip(plan.ops, done, strict=True) if is_done and op.kind == "update"}
        uploaded = {op.subgroup for op, is_done in zip(plan.ops, done, strict=True) if is_done and op.kind == "upload"}
        on_cpu = {op.subgroup for op in plan.ops if op.kind == "update" and op.resource == "cpu"}
        for subgroup in list(self._up):
            self._gradient_used(subgroup)
        self.bring_home()
        for subgroup in range(len(self.subgroups)):
            if subgroup in updated and (subgroup not in on_cpu or subgroup in uploaded):
                continue
            self._buffer("upload", subgroup)
            if subgroup not in updated:
                if subgroup not in self._came_down:
                    self._buffer("gradient down", subgroup)
                    self._copy_gradient(subgroup)
                self._update_host(subgroup, self._out[subgroup])
            else:
                self._round(subgroup)
            self._copy_out(subgroup)

    def release(self) -> None:
        """Give everything back."""
        for block in (*self._on_device.values(), *self._beside.values()):
            self.device.release(block)
        for held in (self._on_device, self._beside, self._host, self._down, self._out):
            held.clear()

    def _host_of(self, subgroup: int) -> torch.Tensor:
        if subgroup not in self._host:
            self._host[subgroup] = self.device.host((3, self.subgroups[subgroup].params), torch.float32)
        return self._host[subgroup]

    def _buffer(self, kind: str, subgroup: int, pinned: bool = True) -> None:
        of, held = self.subgroups[subgroup], self._held[kind]
        if subgroup not in held:
            dtype = of.grad_dtype if kind == "gradient down" else of.dtype
            held[subgroup] = self.device.host((of.params,), dtype, pinned)

    def _come(self, subgroup: int) -> None:
        block = self.device.state(self.subgroups[subgroup].params)
        try:
            self.device.copy("h2d", _rows(self._host[subgroup], block))
        except BaseException:
            self.device.release(block)
            raise
        self._on_device[subgroup] = block

    def _bring_back(self, subgroup: int) -> None:
        self.device.copy("d2h", _rows(self._on_device[subgroup], self._host_of(subgroup)))
        self.device.release(self._on_device.pop(subgroup))

    def _fetch(self, op: Op) -> None:
        self._come(op.subgroup)

    def _flush(self, op: Op) -> None:
        if op.subgroup not in self._on_device:
            raise EngineError(f"subgroup {op.subgroup} leaves the device and is not there")
        self._bring_back(op.subgroup)

    def _gradient_down(self, op: Op) -> None:
        self._copy_gradient(op.subgroup)

    def _gradient_up(self, op: Op) -> None:
        of, down = self.subgroups[op.subgroup], self._down[op.subgroup]
        self._up.add(op.subgroup)
        if of.grad_dtype != of.dtype:
            self._beside[op.subgroup] = self.device.state(of.params, rows=1)
        pieces = [piece for piece, _ in self._live(op.subgroup)]
        pairs = [(down[piece.at : _end(piece)], self._came_up(op.subgroup, piece)) for piece in pieces]
        self.device.copy("h2d", pairs)

    def _came_up(self, subgroup: int, piece: Piece) -> torch.Tensor:
        """Where a gradient is that has come back up."""
        beside = self._beside.get(subgroup)
        if beside is None:
            return self._value(piece)
        return beside.view(-1).view(self.subgroups[subgroup].grad_dtype)[piece.at : _end(piece)]

    def _gradient_used(self, subgroup: int) -> None:
        """A gradient that has come back up is not needed any more."""
        self._up.discard(subgroup)
        if subgroup in self._beside:
            self.device.release(self._beside.pop(subgroup))

    def _update_on_cpu(self, op: Op) -> None:
        self._update_host(op.subgroup, None if op.subgroup in self._casts else self._out[op.subgroup])

    def _update_host(self, subgroup: int, out: torch.Tensor | None) -> None:
        gradient, state = self._down[subgroup], self._host[subgroup]
        self._torn.add(subgroup)
        for begin, end, scalars in self._runs(subgroup):
            master, exp_avg, exp_avg_sq = (row[begin:end] for row in state)
            part = None if out is None else out[begin:end]
            self._kernel.update(gradient[begin:end], master, exp_avg, exp_avg_sq, part, scalars)
        self._torn.discard(subgroup)

    def _update_on_gpu(self, op: Op) -> None:
        state, is_up = self._on_device[op.subgroup], op.subgroup in self._up
        self._torn.add(op.subgroup)
        for piece, scalars in self._live(op.subgroup):
            gradient = self._came_up(op.subgroup, piece) if is_up else self._gradient(piece)
            master, exp_avg, exp_avg_sq = (row[piece.at : _end(piece)] for row in state)
            self.device.update(gradient, master, exp_avg, exp_avg_sq, self._value(piece), scalars)
        self._torn.discard(op.subgroup)
        self._gradient_used(op.subgroup)

    def _cast(self, op: Op) -> None:
        self._round(op.subgroup)

    def _round(self, subgroup: int) -> None:
        self._out[subgroup].copy_(self._host[subgroup][MASTER])

    def _upload(self, op: Op) -> None:
        self._copy_out(op.subgroup)

    def _copy_gradient(self, subgroup: int) -> None:
        down, inputs = self._down[subgroup], self.inputs
        pieces = [piece for piece in self.subgroups[subgroup].pieces if inputs.gradients[piece.param] is not None]
        for piece in pieces:
            if piece.param in inputs.marks:
                inputs.marks[piece.param]()
        self.device.copy("d2h", [(self._gradient(piece), down[piece.at : _end(piece)]) for piece in pieces])
        self._came_down.add(subgroup)
        if not inputs.streams:
            return
        for piece in pieces:
            if self._subgroups_of[piece.param] <= self._came_down:
                inputs.gradients[piece.param] = None

    def _copy_out(self, subgroup: int) -> None:
        out = self._out[subgroup]
        pairs = [(out[piece.at : _end(piece)], self._value(piece)) for piece, _ in self._live(subgroup)]
        self.device.copy("h2d", pairs)

    def _live(self, subgroup: int) -> Iterator[tuple[Piece, Scalars]]:
        """The pieces that this step updates."""
        for piece in self.subgroups[subgroup].pieces:
            scalars = self.inputs.scalars[piece.param]
            if scalars is not None:
                yield piece, scalars

    def _runs(self, subgroup: int) -> Iterator[tuple[int, int, Scalars]]:
        """(begin, end, scalars) of neighbouring pieces that are updated alike."""
        begin, end, last = 0, 0, None
        for piece, scalars in self._live(subgroup):
            if last is not None and (scalars != last or piece.at != end):
                yield begin, end, last
                last = None
            if last is None:
                begin, last = piece.at, scalars
            end = _end(piece)
        if last is not None:
            yield begin, end, last

    def _gradient(self, piece: Piece) -> torch.Tensor:
        gradient = self.inputs.gradients[piece.param]
        assert gradient is not None
        return gradient[piece.begin : piece.end]

    def _value(self, piece: Piece) -> torch.Tensor:
        return self.inputs.values[piece.param][piece.begin : piece.end]


def _rows(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """To be copied one by one: a home may be a part of longer rows."""
    return list(zip(source, target, strict=True))


def _end(piece: Piece) -> int:
    return piece.at + piece.end - piece.begin
