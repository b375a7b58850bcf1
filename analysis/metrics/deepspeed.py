"""What a trace's meta tells of a DeepSpeed job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class DeepSpeed:
    """How DeepSpeed was set up, on rank 0. config: what its user wrote; offload: its section offload_optimizer.

    ratio: the share of the parameters that the CPU is asked to update (Twin-Flow), None where nothing is offloaded to
    it. subgroups: parameters of each, padding included; on_cpu: which of them have their state there; both empty where
    not told. masters_pinned, gradients_pinned: whether fp32 masters and the host's gradients lie in pinned memory.
    policy: of ebbtide's engine, where it drove the job. Facts that were not recorded are None.
    """

    version: str | None
    stage: int | None
    config: dict[str, Any]
    offload: dict[str, Any]
    ratio: float | None
    subgroups: tuple[int, ...]
    on_cpu: tuple[bool, ...]
    masters_pinned: bool | None
    gradients_pinned: bool | None
    checkpointing: bool | None
    policy: str | None

    @property
    def zero(self) -> dict[str, Any]:
        """The section zero_optimization of the configuration, empty where there is none."""
        return _dict(self.config.get("zero_optimization"))

    @property
    def real_ratio(self) -> float | None:
        """The share of the parameters whose state really lies on the CPU: whole subgroups; None where not told."""
        if not self.on_cpu:
            return None
        held = sum(size for size, there in zip(self.subgroups, self.on_cpu, strict=True) if there)
        return held / sum(self.subgroups)

    @property
    def cpu_share(self) -> float:
        """The share whose state lies on the CPU, as far as is known; 1 where nothing else is told."""
        for share in (self.real_ratio, self.ratio):
            if share is not None:
                return share
        return 1.0


def deepspeed_of(trace: Trace) -> DeepSpeed | None:
    """The DeepSpeed facts of a trace; None where it tells of none. What is not of its kind counts as not told."""
    meta = trace.meta.get("deepspeed")
    if not isinstance(meta, dict):
        return None
    config = _dict(meta.get("config"))
    zero = _dict(config.get("zero_optimization"))
    offload = _dict(zero.get("offload_optimizer"))
    stage = _kind(meta.get("stage"), int)
    stage = _kind(zero.get("stage"), int) if stage is None else stage
    subgroups = _list(meta.get("subgroup_params"))
    if not all(type(size) is int and size > 0 for size in subgroups):
        subgroups = ()
    devices = _list(meta.get("subgroup_devices"))
    told = len(devices) == len(subgroups) and all(isinstance(device, str) for device in devices)
    return DeepSpeed(
        version=_kind(meta.get("version"), str),
        stage=stage,
        config=config,
        offload=offload,
        ratio=_ratio(offload, stage),
        subgroups=subgroups,
        on_cpu=tuple(device.partition(":")[0] == "cpu" for device in devices) if told else (),
        masters_pinned=_kind(meta.get("masters_pinned"), bool),
        gradients_pinned=_kind(meta.get("gradients_pinned"), bool),
        checkpointing=_kind(meta.get("activation_checkpointing"), bool),
        policy=_kind(meta.get("policy"), str),
    )


def resident(ratio: float, subgroups: int) -> int:
    """How many of the first subgroups DeepSpeed keeps on the GPU: it puts subgroup i on the CPU where
    i >= int((1 - ratio) * subgroups) (runtime/zero/stage3.py of 0.19)."""
    return int((1 - ratio) * subgroups)


def _ratio(offload: dict[str, Any], stage: int | None) -> float | None:
    if offload.get("device") not in ("cpu", "nvme"):
        return None
    asked = offload.get("ratio", 1.0)
    # ZeRO-1 and ZeRO-2 know no ratio: they offload everything.
    if stage in (1, 2):
        return 1.0
    return float(asked) if isinstance(asked, (int, float)) and 0 <= asked <= 1 else None


def _kind(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else ()
