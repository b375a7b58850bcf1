"""The description of a job that does not depend on a machine, and the settings of it that may be changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine


@dataclass(frozen=True, order=True)
class TunableSettings:
    """Settings that a change may alter.

    Attributes:
        ranks: Ranks that share parameters, gradients and optimizer state (ZeRO-3, FSDP).
        micro_batch: Samples of a micro-step on a rank; None: not known.
        checkpointing: Whether activations are computed again in the backward.
        offload: Whether optimizer state may be kept in host memory.
    """

    ranks: int
    micro_batch: int | None
    checkpointing: bool
    offload: bool


@dataclass(frozen=True)
class ComputeTimes:
    """The times of an iteration without its update.

    Attributes:
        forward_s: The forward.
        backward_s: The backward.
        other_s: The time outside of the phases.
        factor: The factor within which their sum is known: one standard error, normal in the logarithm.
        collectives_s: The time that exchanges with other ranks would take alone; they overlap with the rest.
        note: The source of the times, for people.
    """

    forward_s: float
    backward_s: float
    other_s: float
    factor: float
    collectives_s: float
    note: str


class Compute(Protocol):
    """The compute of a job: its times on a machine."""

    def times(self, machine: Machine, settings: TunableSettings, micro_steps: int) -> ComputeTimes:
        """Return the times of an iteration of `micro_steps` micro-steps.

        Raises:
            MachineError: The machine does not state the rates of its GPU, and they are needed.
        """
        ...


@dataclass(frozen=True)
class MemoryPoint:
    """Device memory from a point of the iteration on.

    Attributes:
        point: 0 to 1 is the time outside of the phases, to 2 the forward, to 3 the backward; the update begins at 3.
        gradient_bytes: Gradients in the job's own memory.
        activation_bytes: Activations and temporaries, in proportion to the micro-batch.
    """

    point: float
    gradient_bytes: float
    activation_bytes: float


@dataclass(frozen=True)
class OwnMemory:
    """The device memory of one rank, without optimizer state and without gradients that a plan accounts for.

    Attributes:
        fixed_bytes: Memory that no change reduces.
        param_bytes: Parameters on the device, which more ranks share.
        gather_bytes: Parameters of other ranks that are on the device meanwhile, if there are several ranks.
        points: Gradients and activations over the iteration; the first at 0.
        checkpointed: The share of activations that remains with checkpointing; None: it cannot be switched on.
    """

    fixed_bytes: float
    param_bytes: float
    gather_bytes: float
    points: tuple[MemoryPoint, ...]
    checkpointed: float | None = None


@dataclass(frozen=True)
class TrainingJob:
    """A job to find a machine for.

    Attributes:
        workload: One rank's part; its times and free memory are replaced for each machine.
        settings: The settings as they are.
        compute: Its compute.
        memory: Its own memory; None: not known, the workload's free memory is that of every machine.
        state_bytes: Bytes per parameter of optimizer state if nothing is offloaded, where they differ from the
            workload's (which includes an fp32 master weight).
        micro_steps: Micro-steps of an iteration.
        tokens: Tokens of an iteration, of all ranks, with the settings as they are; None: not known.
        recorded: Settings for the lines to paste.
        notes: Estimates and gaps, for people.
    """

    workload: Workload
    settings: TunableSettings
    compute: Compute
    memory: OwnMemory | None
    state_bytes: float | None = None
    micro_steps: int = 1
    tokens: float | None = None
    recorded: RecordedJob = field(default_factory=RecordedJob)
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object `job` of `ebbtide plan --json`."""
        return {
            "name": self.workload.name,
            "params": self.workload.params,
            **asdict(self.settings),
            "micro_steps": self.micro_steps,
            "tokens": self.tokens,
            "notes": list(self.notes),
        }

    def micro_steps_of(self, settings: TunableSettings) -> int:
        """Return the micro-steps of an iteration: a smaller micro-batch has more, so that the batch stays."""
        if settings.micro_batch is None or self.settings.micro_batch is None:
            return self.micro_steps
        return -(-self.micro_steps * self.settings.micro_batch // settings.micro_batch)

    def tokens_of(self, settings: TunableSettings) -> float | None:
        """Return the tokens of an iteration of all ranks: each rank has as many as before."""
        return None if self.tokens is None else self.tokens * settings.ranks / self.settings.ranks
