"""The description of a job that does not depend on a machine, and the settings of it
that may be changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.evidence import EvidenceRange
from ebbtide.machines.machine import Machine


@dataclass(frozen=True, order=True)
class TunableSettings:
    """Settings that a change may alter."""

    # Ranks that share parameters, gradients and optimizer state (ZeRO-3, FSDP).
    ranks: int
    micro_batch: int | None  # Samples of a micro-step on a rank; None: not known.
    checkpointing: bool  # Whether activations are computed again in the backward.
    offload: bool  # Whether optimizer state may be kept in host memory.


@dataclass(frozen=True)
class ComputeTimes:
    """The times of an iteration without its update."""

    forward_s: float
    backward_s: float
    other_s: float
    # The factor within which their sum is known: one standard error, normal in the
    # logarithm.
    factor: float
    # The time that exchanges with other ranks would take alone; they overlap with the
    # rest.
    collectives_s: float
    note: str  # The source of the times, for people.
    own_update_s: float | None = None  # See `Workload`.
    # The range of an iteration by jobs that are like it, and how far to trust it; None:
    # the times were measured.
    evidence: EvidenceRange | None = None


class Compute(Protocol):
    """The compute of a job: its times on a machine."""

    def times(
        self, machine: Machine, settings: TunableSettings, micro_steps: int
    ) -> ComputeTimes:
        """Return the times of an iteration. Raises MachineError where rates of the GPU
        are needed and not known."""


@dataclass(frozen=True)
class MemoryPoint:
    """Device memory from a point of the iteration on."""

    # 0 to 1 is the time outside of the phases, to 2 the forward, to 3 the backward; the
    # update begins at 3.
    point: float
    gradient_bytes: float
    # Activations and temporaries, in proportion to the micro-batch.
    activation_bytes: float


@dataclass(frozen=True)
class OwnMemory:
    """The device memory of one rank, without optimizer state and without gradients that
    a plan accounts for."""

    fixed_bytes: float  # Memory that no change reduces.
    param_bytes: float
    # Parameters of other ranks that are on the device meanwhile, if there are several
    # ranks.
    gather_bytes: float
    # Gradients and activations over the iteration; the first at 0.
    points: tuple[MemoryPoint, ...]
    # The same of tensors alone, where `points` are of memory that torch keeps, which
    # follows the most of these.
    tensors: tuple[MemoryPoint, ...] = ()
    cached_bytes: float = 0.0  # The peak of `points` beyond the peak of `tensors`.
    # The share of activations that remains with checkpointing; None: it cannot be
    # switched on.
    checkpointed: float | None = None
    # The share of gradients that a change leaves on the device.
    gradient_share: float = 1.0
    # The memory of the GPU that it was recorded on; None: not recorded, or as the
    # machine of the trace states it.
    capacity_bytes: float | None = None


@dataclass(frozen=True)
class JobFacts:
    """Facts that decide which settings of a job can be changed. Shares are of the bytes
    of all parameters."""

    # What trains it, as in the trace's entry `framework`, or `deepspeed`.
    framework: str = "torch"
    # Parameters of the whole model, those that are not trained included; None: not
    # known.
    total_params: int | None = None
    # Moments of Adam per trained parameter; 0: its state is of another kind, or
    # quantized.
    moments: int = 2
    has_adapters: bool = False  # Whether only adapters are trained.
    has_quantized_weights: bool = False
    embedding_share: float = 0.0
    head_share: float = 0.0
    largest_share: float = 0.0


@dataclass(frozen=True)
class TrainingJob:
    """A job to find a machine for."""

    # One rank's part; its times and free memory are replaced for each machine.
    workload: Workload
    settings: TunableSettings
    compute: Compute
    # Its own memory; None: not known, the workload's free memory counts for every
    # machine.
    memory: OwnMemory | None
    # Bytes per parameter of optimizer state without offload, where the workload's, with
    # an fp32 master, differ.
    state_bytes: float | None = None
    micro_steps: int = 1
    # Tokens of an iteration, of all ranks, with the settings as they are; None: not
    # known.
    tokens: float | None = None
    recorded: RecordedJob = field(default_factory=RecordedJob)
    notes: tuple[str, ...] = ()
    facts: JobFacts = JobFacts()
    # The most host memory of a rank, while it loads or trains; None: not known.
    host_peak_bytes: float | None = None

    def exceeds_host(self, host_bytes: float | None) -> bool:
        """Return whether a rank takes more host memory than it has; None: not known."""
        peak = self.host_peak_bytes
        return peak is not None and host_bytes is not None and peak > host_bytes

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


@dataclass(frozen=True)
class Variant:
    """A job with changes, whose state may be `device`, `paged` or `offloaded`."""

    job: TrainingJob
    settings: TunableSettings
    state: str = "device"

    def with_settings(self, **changes: Any) -> Variant:
        """Return the variant with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def share(self) -> float:
        """The share of the parameters that a rank had which it has now."""
        return self.job.settings.ranks / self.settings.ranks

    @property
    def params(self) -> int:
        """Parameters of a rank."""
        own = self.job.settings.ranks
        return -(-self.job.workload.params * own // self.settings.ranks)

    @property
    def micro_steps(self) -> int:
        """The micro-steps of an iteration: a smaller micro-batch has more, so that the
        batch stays."""
        own, size = self.job.settings.micro_batch, self.settings.micro_batch
        steps = self.job.micro_steps
        return steps if size is None or own is None else -(-steps * own // size)

    @property
    def adds_micro_steps(self) -> bool:
        """Whether the job has fewer micro-steps, so that more gradients stay."""
        return self.micro_steps > self.job.micro_steps

    @property
    def gradient_bytes(self) -> float:
        """The bytes of all gradients of a rank."""
        return self.job.workload.grad_bytes * self.params

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients go to the host as they are computed, which they did not:
        where there is one micro-step."""
        is_new = self.settings.offload and not self.job.settings.offload
        return is_new and self.micro_steps == 1

    @property
    def tokens(self) -> float | None:
        """The tokens of an iteration of all ranks: each rank has as many as before."""
        own = self.job.settings.ranks
        return self.job.tokens and self.job.tokens * self.settings.ranks / own
