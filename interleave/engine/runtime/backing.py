"""Memory behind host memory, for state that the host does not hold.

There is none, unless a feature has some.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ebbtide.interleave.engine.commits import commit_place
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.plan import Plan
from ebbtide.machines.machine import Machine


class BackedStates:
    """The states of subgroups behind the host's memory: none here.

    Attributes:
        host_bytes: Host memory of the buffers that states pass through.
        read_bytes: Bytes read so far.
        written_bytes: Bytes written so far.
    """

    host_bytes = 0
    read_bytes = 0
    written_bytes = 0

    def has(self, subgroup: int) -> bool:
        """Return whether the newest state of a subgroup is here."""
        return False

    def is_planned(self, subgroup: int) -> bool:
        """Return whether the plan has the state of a subgroup here."""
        return False

    def prepare(self, plan: Plan) -> None:
        """Allocate the buffers of a plan, and reserve space for its writes. Raises
        EngineError if it is too little."""

    def load(self, subgroup: int, number: int) -> torch.Tensor:
        """Read a state into a buffer of the plan, by its index.

        Return it, in the buffer.
        """
        raise NotImplementedError

    def reload(self, subgroup: int) -> None:
        """Read a state again into its buffer, of `load`."""
        raise NotImplementedError

    def save(self, subgroup: int) -> None:
        """Write a state that is in a buffer, of `load`."""
        raise NotImplementedError

    def read(self, subgroup: int) -> torch.Tensor:
        """Return the state of a subgroup in new host memory."""
        raise NotImplementedError

    def write(self, subgroup: int, state: torch.Tensor) -> None:
        """Write the state of a subgroup from any memory."""
        raise NotImplementedError

    def move_in(self, subgroup: int, state: torch.Tensor) -> None:
        """Write the state of a subgroup from any memory, through a buffer. None of them
        may be in use."""
        raise NotImplementedError

    def move_out(self, subgroup: int, state: torch.Tensor) -> None:
        """Read the state of a subgroup into any memory, through a buffer, for good. No
        buffer may be in use."""
        raise NotImplementedError

    def commit(self, read: Callable[[int], torch.Tensor]) -> dict[str, Any]:
        """Make the newest state of all subgroups the one to resume from.

        Return what `Backing.open` takes.

        No operation may run, and no buffer may be in use. `read` returns a state that
        is not here."""
        raise EngineError(
            "commit() is for optimizers with storage=: save the state_dict() of others"
        )

    def close(self) -> None:
        """Release all memory."""


class Backing:
    """The memory behind host memory, for one engine after the other: none here.

    Attributes:
        is_used: Whether a machine with it has storage.
        host_bytes: Bytes of host memory for state and buffers; None for most of what is
            available.
        written_bytes: Bytes of state written so far.
    """

    is_used = False
    host_bytes: float | None = None
    written_bytes = 0

    def added_to(self, machine: Machine) -> Machine:
        """Return a machine that has this storage, and no other."""
        return replace(machine, storage=())

    def check(self, subgroups: Sequence[Subgroup], commit: Mapping[str, Any]) -> None:
        """Raise EngineError if a commit of these subgroups cannot be opened here."""
        raise EngineError(
            f"{commit_place(commit)}, and this optimizer has no storage: create it "
            "with storage="
        )

    def open(
        self,
        subgroups: Sequence[Subgroup],
        device: Device,
        commit: Mapping[str, Any] | None = None,
    ) -> BackedStates:
        """Return the states of subgroups, of a commit that was checked.

        Return None for new state.
        """
        return BackedStates()
