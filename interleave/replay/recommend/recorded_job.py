"""The settings of a recorded job that a recommendation repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class RecordedJob:
    """The settings of a job, as far as they are known.

    Attributes:
        config: The configuration of DeepSpeed; empty for other jobs.
        stage: The stage of ZeRO; None for other jobs.
        micro_steps: Micro-steps of an iteration; None if they are not known.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    micro_steps: int | None = None

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
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    def settings(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the configured values of some keys, without those that DeepSpeed's caller fills in (`auto`)."""
        return {name: self.config[name] for name in names if _is_set(self.config.get(name))}


def recorded_job(trace: Trace) -> RecordedJob:
    """Return the settings of the job of a trace."""
    from ebbtide.analysis.metrics.trace_metrics import TraceMetrics

    metrics = TraceMetrics(trace)
    setup = metrics.deepspeed
    if setup is None:
        return RecordedJob(micro_steps=metrics.micro_steps)
    return RecordedJob(setup.info.config, setup.stage, metrics.micro_steps)


def _is_set(value: Any) -> bool:
    return value is not None and "auto" not in (value.values() if isinstance(value, dict) else (value,))
