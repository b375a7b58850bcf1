"""The description of a job that does not depend on a machine, and the settings of it that may be changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, order=True)
class TunableSettings:
    """Settings that a change may alter."""

    ranks: int  # Ranks that share parameters, gradients and optimizer state (ZeRO-3, FSDP).
    micro_batch: int | None  # Samples of a micro-step on a rank; None: not known.
    checkpointing: bool  # Whether activations are computed again in the backward.
    offload: bool  # Whether optimizer state may be kept in host memory.


@dataclass(frozen=True)
class ComputeTimes:
    """The times of an iteration without its update."""

    forward_s: float
    backward_s: float
    other_s: float
    factor: float  # The factor within which their sum is known: one standard error, normal in the logarithm.
    collectives_s: float  # The time that exchanges with other ranks would take alone; they overlap with the rest.
    note: str  # The source of the times, for people.
    own_update_s: float | None = None  # See `Workload`.


class Compute(Protocol):
    """The compute of a job: its times on a machine."""

    def times(self, machine: Machine, settings: TunableSettings, micro_steps: int) -> ComputeTimes:
        """Return the times of an iteration. Raises MachineError where rates of the GPU are needed and not known."""


@dataclass(frozen=True)
class MemoryPoint:
    """Device memory from a point of the iteration on."""

    # 0 to 1 is the time outside of the phases, to 2 the forward, to 3 the backward; the update begins at 3.
    point: float
    gradient_bytes: float
    activation_bytes: float  # Activations and temporaries, in proportion to the micro-batch.


@dataclass(frozen=True)
class OwnMemory:
    """The device memory of one rank, without optimizer state and without gradients that a plan accounts for."""

    fixed_bytes: float  # Memory that no change reduces.
    param_bytes: float
    gather_bytes: float  # Parameters of other ranks that are on the device meanwhile, if there are several ranks.
    points: tuple[MemoryPoint, ...]  # Gradients and activations over the iteration; the first at 0.
    # The same of tensors alone, where `points` are of memory that torch keeps, which follows the most of these.
    tensors: tuple[MemoryPoint, ...] = ()
    cached_bytes: float = 0.0  # The peak of `points` beyond that of `tensors`.
    # The share of activations that remains with checkpointing; None: it cannot be switched on.
    checkpointed: float | None = None
    gradient_share: float = 1.0  # The share of gradients that a change leaves on the device.
    # The memory of the GPU that it was recorded on; None: not recorded, or as the machine of the trace states it.
    capacity_bytes: float | None = None


@dataclass(frozen=True)
class JobFacts:
    """Facts that decide which settings of a job can be changed. Shares are of the bytes of all parameters."""

    framework: str = "torch"  # What trains it, as in the trace's entry `framework`, or `deepspeed`.
    # Parameters of the whole model, those that are not trained included; None: not known.
    total_params: int | None = None
    moments: int = 2  # Moments of Adam per trained parameter; 0: its state is of another kind, or quantized.
    has_adapters: bool = False  # Whether only adapters are trained.
    has_quantized_weights: bool = False
    embedding_share: float = 0.0
    head_share: float = 0.0
    largest_share: float = 0.0


@dataclass(frozen=True)
class TrainingJob:
    """A job to find a machine for."""

    workload: Workload  # One rank's part; its times and free memory are replaced for each machine.
    settings: TunableSettings
    compute: Compute
    memory: OwnMemory | None  # Its own memory; None: not known, the workload's free memory is that of every machine.
    # Bytes per parameter of optimizer state without offload, where the workload's, with an fp32 master, differ.
    state_bytes: float | None = None
    micro_steps: int = 1
    tokens: float | None = None  # Tokens of an iteration, of all ranks, with the settings as they are; None: not known.
    recorded: RecordedJob = field(default_factory=RecordedJob)
    notes: tuple[str, ...] = ()
    facts: JobFacts = JobFacts()

    def as_json(self) -> dict[str, Any]:
        """Return the object `job` of `ebbtide plan --json`."""
        return {
            "name": self.workload.name,
            "params": self.workload.params,
            "total_params": self.facts.total_params,
            "framework": self.facts.framework,
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
