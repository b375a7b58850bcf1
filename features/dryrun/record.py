"""The record of a dry run: what was counted, as numbers and strings, and its file."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.memory.device_memory import DeviceBlock
from ebbtide.features.dryrun.time.clock import LaunchedCopy, LaunchedKernel
from ebbtide.features.dryrun.time.phase_tracker import (
    FakeForward,
    FakeMark,
    FakePhase,
)
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class RunRecord:
    """Everything that a trace says of a dry run.

    Attributes:
        iterations: Iterations that ended.
        finished: Whether all iterations were reached.
        description: Entries of the rank in meta.json: model, optimizers, framework;
            empty without an iteration.
        assumptions: What the times rest on, in words.
        prediction: Further entries of `prediction` in meta.json.
        deepspeed: The entry `deepspeed`; None: no engine of DeepSpeed.
        memory, host_memory: (time in ns, bytes of each pool) after each change; of
            the device by its number, the fullest one first.
        stacks: Texts of the call stacks, which blocks name by their position.
        rank, peers: Its rank, and the records of other ranks.
    """

    machine: Machine | None
    device_name: str
    capacity_bytes: int | None
    ranks: int
    iterations: int
    finished: bool
    versions: dict[str, str]
    description: dict[str, Any]
    assumptions: dict[str, str]
    prediction: dict[str, Any]
    deepspeed: dict[str, Any] | None
    phases: list[FakePhase]
    without_gradients: list[FakeForward]
    marks: list[FakeMark]
    kernels: list[LaunchedKernel]
    copies: list[LaunchedCopy]
    memory: dict[int, list[tuple[int, int, int, int]]]
    host_memory: list[tuple[int, int, int]]
    blocks: list[DeviceBlock]
    stacks: list[str]
    notes: list[str]
    rank: int = 0
    peers: "list[RunRecord]" = field(default_factory=list)


class _RecordUnpickler(pickle.Unpickler):
    """Reads classes of ebbtide alone."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] != "ebbtide" or "." in name:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def save_record(record: RunRecord, command: list[str], status: int, path: Path) -> None:
    """Write a record, the command of the job and its exit status to a file."""
    path.write_bytes(pickle.dumps((record, command, status)))


def load_record(path: Path) -> tuple[RunRecord, list[str], int]:
    """Return what `save_record` has written."""
    try:
        with path.open("rb") as file:
            record, command, status = _RecordUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise DryRunError(f"the dry run left no record: {error}") from None
    return record, command, status
