"""The settings of a recorded job for a replay, and its workload without offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbtide.interleave.model.workload import Workload
from ebbtide.json_files import section
from ebbtide.machines.machine import Machine
from ebbtide.phases import UPDATE

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class RecordedJob:
    """The settings of a job, as far as they are known.

    `state_bytes`: bytes of optimizer state per parameter. `own_update_s`: the length of
    its update, all state on the device; None: not known. `policy`: its own one.
    `iteration_s`: its recorded iteration on the machine named `machine`; None:
    predicted, or not known.
    """

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
        """Whether the configuration is all of the job's.

        Keys that are not there have their defaults.
        """
        return bool(self.config) and (
            self.stage is not None or "zero_optimization" in self.config
        )

    @property
    def micro_batch(self) -> int | None:
        """Samples of a micro-step on a rank; None if they are not known."""
        size = self.config.get("train_micro_batch_size_per_gpu")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Learning rate, betas, eps and weight decay of DeepSpeed's optimizer; empty if
        they are not configured."""
        options = self.section("optimizer").get("params")
        if not isinstance(options, dict):
            return {}
        values = {
            key: options[key]
            for key in ("lr", "betas", "eps", "weight_decay")
            if _is_set(options.get(key))
        }
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        # The default of DeepSpeed's optimizers, other than torch.optim.AdamW's.
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
        """Return the configured values of some keys.

        Values that DeepSpeed's caller fills in (`auto`) are left out.
        """
        return {
            name: self.config[name] for name in names if _is_set(self.config.get(name))
        }


def recorded_job(trace: Trace) -> RecordedJob:
    """Return the settings of the job of a trace."""
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.interleave.replay.inputs import own_machine

    metrics = JobMetrics(trace)
    setup, machine, iteration_ms = (
        metrics.setup,
        own_machine(trace),
        metrics.iteration_ms,
    )
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
    return replace(job, config=setup.config, stage=setup.stage)


def state_bytes_on_device(metrics: JobMetrics) -> float | None:
    """Return the bytes of state per parameter that a job keeps on the device.

    Return None where it is not known to keep any.
    """
    from ebbtide.analysis.metrics.recorded_free_memory import torch_state_on_device

    total = torch_state_on_device(metrics.entry.optimizers)
    return total / metrics.params if total and metrics.params else None


def recorded_policy(trace: Trace) -> str | None:
    """Return the policy that a job ran under its framework, or ebbtide's engine in it.

    Return None if it is not known.
    """
    from ebbtide.analysis.metrics.framework_setup import framework_setup

    setup = framework_setup(trace)
    return None if setup is None else setup.recorded_policy


def _is_set(value: Any) -> bool:
    return value is not None and "auto" not in (
        value.values() if isinstance(value, dict) else (value,)
    )


def own_job(workload: Workload, job: RecordedJob | None) -> Workload:
    """Return the workload without offload.

    A job whose state is on the device today has its own state and update.
    """
    if job is None:
        return workload
    if job.state_bytes is None:
        return replace(workload, own_update_s=job.own_update_s)
    # Its gradients are in the memory that it takes already, or in the memory of layers.
    stay = workload.gradients_held_until_step or not workload.layers
    return replace(
        workload,
        state_bytes=job.state_bytes,
        gradients_held_until_step=stay,
        own_update_s=job.own_update_s,
    )
