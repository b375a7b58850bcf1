"""The description of a job that does not depend on a machine, and the settings of it that may be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide.interleave.model.workload import Workload
from ebbtide.json_files import section
from ebbtide.machines.machine import Machine
from ebbtide.phases import UPDATE

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.profiler.trace import Trace

# The first version of DeepSpeed that copies gradients asynchronously by itself.
_ASYNC_GRADIENTS = (0, 19, 5)


@dataclass(frozen=True)
class RecordedJob:
    """The settings of a job, as far as they are known; `state_bytes`: of optimizer state per parameter, and
    `own_update_s`: the length of its update, None: the state is not on the device. `policy`: its own one.
    `iteration_s`: its recorded iteration on the machine named `machine`, None: predicted, or not known."""

    config: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    micro_steps: int | None = None
    state_bytes: float | None = None
    own_update_s: float | None = None
    policy: str | None = None
    iteration_s: float | None = None
    machine: str | None = None

    def recorded_s(self, machine: Machine) -> float | None:
        """Return the recorded iteration if it is of a machine."""
        return self.iteration_s if machine.name == self.machine else None

    @property
    def is_configured(self) -> bool:
        """Whether the configuration is all of a DeepSpeed job's: keys that are not there have their defaults."""
        return bool(self.config) and (self.stage is not None or "zero_optimization" in self.config)

    @property
    def micro_batch(self) -> int | None:
        """Samples of a micro-step on a rank; None if they are not known."""
        size = self.config.get("train_micro_batch_size_per_gpu")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Learning rate, betas, eps and weight decay of DeepSpeed's optimizer; empty if they are not configured."""
        options = self.section("optimizer").get("params")
        if not isinstance(options, dict):
            return {}
        values = {key: options[key] for key in ("lr", "betas", "eps", "weight_decay") if _is_set(options.get(key))}
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        # The default of DeepSpeed's optimizers, other than that of torch.optim.AdamW.
        return {"weight_decay": 0.0, **values}

    @property
    def offloads_params(self) -> bool:
        """Whether parameters are offloaded too (ZeRO-Infinity)."""
        offload = self.section("zero_optimization").get("offload_param")
        return isinstance(offload, dict) and offload.get("device", "none") != "none"

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the configuration; empty if there is none."""
        return section(self.config, name)

    def settings(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the configured values of some keys, without those that DeepSpeed's caller fills in (`auto`)."""
        return {name: self.config[name] for name in names if _is_set(self.config.get(name))}


def recorded_job(trace: Trace) -> RecordedJob:
    """Return the settings of the job of a trace."""
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.interleave.advise.job.inputs import own_machine

    metrics = JobMetrics(trace)
    setup, machine, iteration_ms = metrics.deepspeed, own_machine(trace), metrics.iteration_ms
    is_measured = trace.meta.source not in ("predicted", "simulated")
    job = RecordedJob(
        micro_steps=metrics.micro_steps,
        policy="gpu-only" if metrics.offloaded is False else recorded_policy(trace),
        iteration_s=iteration_ms / 1e3 if iteration_ms and is_measured else None,
        machine=None if machine is None else machine.name,
    )
    if setup is None:
        state, update_ms = state_bytes_on_device(metrics), metrics.phase_ms(UPDATE)
        own_s = state and update_ms and update_ms / 1e3
        return replace(job, state_bytes=state, own_update_s=own_s or None)
    return replace(job, config=setup.info.config, stage=setup.stage)


def state_bytes_on_device(metrics: JobMetrics) -> float | None:
    """Return the bytes of state per parameter that a job keeps on the device; None where it is not known to."""
    from ebbtide.analysis.metrics.recorded_free_memory import torch_state_on_device

    total = torch_state_on_device(metrics.entry.optimizers)
    return total / metrics.params if total and metrics.params else None


def recorded_policy(trace: Trace) -> str | None:
    """Return the policy that a DeepSpeed job ran under: that of ebbtide's engine, or by its configuration, with the
    keys of the published interleaving (`prefetch_optimizer`, `part_grads_async`); None: not known."""
    from ebbtide.analysis.metrics.deepspeed import deepspeed_of, version_numbers

    job = deepspeed_of(trace)
    if job is None:
        return None
    if job.info.policy is not None:
        return job.info.policy
    offload = job.offload_config
    stride = offload.get("prefetch_optimizer_gap") if offload.get("prefetch_optimizer") else None
    if offload.get("device") != "cpu" or job.ratio is None or not isinstance(stride, (int, float, type(None))):
        return None
    asynchronous = offload.get("part_grads_async")
    if asynchronous is None:
        asynchronous = version_numbers(job.info.version) >= _ASYNC_GRADIENTS
    grads = "async" if asynchronous else "blocking"
    if stride:
        return f"interleaved:{int(stride)}@{job.ratio:g},grads={grads}"
    name = "zero-offload" if job.ratio == 1 else f"twin-flow:{job.ratio:g}"
    return f"{name},grads={grads}"


def _is_set(value: Any) -> bool:
    return value is not None and "auto" not in (value.values() if isinstance(value, dict) else (value,))


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
