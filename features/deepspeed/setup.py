"""The setup of a DeepSpeed job, with figures computed from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from ebbtide.analysis.metrics.framework_setup import FrameworkSetup, framework_setup
from ebbtide.analysis.metrics.state_split import Framework
from ebbtide.features.deepspeed.split import DeepSpeedSplit, version_numbers
from ebbtide.json_files import section
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import GRAD_BYTES, MASTER_BYTES, PARAM_BYTES
from ebbtide.units import count_text

# The default of offload_optimizer.buffer_count (runtime/zero/offload_config.py).
DEFAULT_SWAP_BUFFERS = 4
# The first version that copies gradients asynchronously by itself.
_ASYNC_GRADIENTS = (0, 19, 5)
_FP32_BYTES = 4
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class DeepSpeedInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The section `deepspeed` of meta.json.

    The first rank of the job or its log reported it.
    """

    version: str | None = None
    config: dict[str, Any] = {}
    stage: int | None = None
    subgroup_params: tuple[_Positive, ...] = ()
    subgroup_devices: tuple[str, ...] = ()
    masters_pinned: bool | None = None
    gradients_pinned: bool | None = None
    activation_checkpointing: bool | None = None
    policy: str | None = None
    moments_lost: bool | None = None
    largest_stored_gradient_bytes: _Positive | None = None


@dataclass(frozen=True)
class DeepSpeedSetup:
    """The setup of DeepSpeed on the first rank: a `FrameworkSetup`."""

    # The recorded values; None or empty where they were not recorded.
    info: DeepSpeedInfo
    key: ClassVar[str] = "deepspeed"
    name: ClassVar[str] = "DeepSpeed"

    @property
    def recorded(self) -> dict[str, Any]:
        """The section as it was recorded, without malformed values."""
        values: dict[str, Any] = msgspec.to_builtins(self.info)
        return values

    @property
    def version(self) -> str | None:
        """The version of DeepSpeed."""
        return self.info.version

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the user wrote."""
        return self.info.config

    @property
    def policy(self) -> str | None:
        """The policy of `enable`; None where DeepSpeed ran the updates."""
        return self.info.policy

    @property
    def checkpointing(self) -> bool | None:
        """Whether activations are checkpointed."""
        return self.info.activation_checkpointing

    @property
    def zero_config(self) -> dict[str, Any]:
        """The section `zero_optimization` of the user's configuration; empty where
        there is none."""
        return section(self.info.config, "zero_optimization")

    @property
    def offload_config(self) -> dict[str, Any]:
        """The section `zero_optimization.offload_optimizer` of the configuration; empty
        where there is none."""
        return section(self.zero_config, "offload_optimizer")

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO, as recorded, else as configured."""
        if self.info.stage is not None:
            return self.info.stage
        stage = self.zero_config.get("stage")
        return stage if isinstance(stage, int) else None

    @property
    def offloads(self) -> bool | None:
        """Whether optimizer state is in host memory or on storage; None without a
        section `offload_optimizer`."""
        if not isinstance(self.zero_config.get("offload_optimizer"), dict):
            return None
        return (
            self.offload_config.get("device") in ("cpu", "nvme") and self.cpu_share > 0
        )

    @property
    def ratio(self) -> float | None:
        """The configured share of the parameters that the CPU updates (Twin-Flow); None
        where nothing is offloaded."""
        if self.offload_config.get("device") not in ("cpu", "nvme"):
            return None
        # ZeRO-1 and ZeRO-2 do not have a ratio: they offload everything.
        if self.stage in (1, 2):
            return 1.0
        ratio = self.offload_config.get("ratio", 1.0)
        return (
            float(ratio)
            if isinstance(ratio, (int, float)) and 0 <= ratio <= 1
            else None
        )

    @property
    def subgroups(self) -> tuple[int, ...]:
        """Parameters of each subgroup, padding included; empty where they were not
        recorded."""
        return self.info.subgroup_params

    @property
    def subgroup_params(self) -> int | None:
        """The configured parameters of a subgroup (`sub_group_size`)."""
        size = self.zero_config.get("sub_group_size")
        return int(size) if isinstance(size, (int, float)) and size >= 1 else None

    @property
    def on_cpu(self) -> tuple[bool, ...]:
        """Whether the state of each subgroup is in host memory; empty where that was
        not recorded."""
        devices = self.info.subgroup_devices
        return (
            tuple(device.partition(":")[0] == "cpu" for device in devices)
            if len(devices) == len(self.subgroups)
            else ()
        )

    @property
    def real_ratio(self) -> float | None:
        """The share of the parameters whose state is in host memory, as recorded: a sum
        of whole subgroups."""
        if not self.on_cpu:
            return None
        return sum(
            size
            for size, on_cpu in zip(self.subgroups, self.on_cpu, strict=True)
            if on_cpu
        ) / sum(self.subgroups)

    @property
    def rounded_ratio(self) -> float | None:
        """The share that the configured ratio gives in whole subgroups, rounded by the
        rule of the version.

        None where ratio or subgroups were not recorded, and for stages that do not
        split between subgroups."""
        if self.ratio is None or not self.subgroups or self.stage != 3:
            return None
        on_gpu = DeepSpeedSplit(self.info.version or "").resident(
            self.ratio, len(self.subgroups)
        )
        total = sum(self.subgroups)
        return (total - sum(self.subgroups[on_gpu.start : on_gpu.stop])) / total

    @property
    def cpu_share(self) -> float:
        """The share whose state is in host memory, as recorded, else as configured (in
        whole subgroups), else 1."""
        for share in (self.real_ratio, self.rounded_ratio, self.ratio):
            if share is not None:
                return share
        return 1.0

    @property
    def framework(self) -> Framework | None:
        """DeepSpeed in its version, if it chose the resident subgroups; None if
        ebbtide's engine did."""
        return (
            Framework(self.key, self.info.version or "")
            if self.info.policy is None
            else None
        )

    @property
    def recorded_policy(self) -> str | None:
        """The policy of the recorded job by ebbtide's engine or by its configuration;
        None: not known.

        The keys of the published interleaving (`prefetch_optimizer`,
        `part_grads_async`) count."""
        if self.info.policy is not None:
            return self.info.policy
        offload = self.offload_config
        stride = (
            offload.get("prefetch_optimizer_gap")
            if offload.get("prefetch_optimizer")
            else None
        )
        if (
            offload.get("device") != "cpu"
            or self.ratio is None
            or not isinstance(stride, (int, float, type(None)))
        ):
            return None
        asynchronous = offload.get("part_grads_async")
        if asynchronous is None:
            asynchronous = version_numbers(self.info.version) >= _ASYNC_GRADIENTS
        grads = "async" if asynchronous else "blocking"
        if stride:
            return f"interleaved:{int(stride)}@{self.ratio:g},grads={grads}"
        name = "zero-offload" if self.ratio == 1 else f"twin-flow:{self.ratio:g}"
        return f"{name},grads={grads}"

    @property
    def host_buffer_bytes(self) -> int | None:
        """The bytes of host memory for state on storage; None if no state is there.

        They are `buffer_count` buffers of the largest subgroup in fp32, gradients and
        parameters in half precision, and fp32 gradients unless these are stored
        (runtime/swap_tensor/optimizer_utils.py, runtime/zero/stage3.py)."""
        if self.offload_config.get("device") != "nvme" or not self.subgroups:
            return None
        count = self.offload_config.get("buffer_count", DEFAULT_SWAP_BUFFERS)
        on_storage = self.info.largest_stored_gradient_bytes is not None
        per_param = PARAM_BYTES + GRAD_BYTES + (0 if on_storage else _FP32_BYTES)
        return int(count) * _FP32_BYTES * max(self.subgroups) + per_param * sum(
            self.subgroups
        )

    def state_on_device(self, params: int, state_bytes: float) -> int | None:
        """Return the bytes of optimizer state on the device.

        Also counted are the gradients in fp32 that stage 3 keeps beside it
        (`DeepSpeedSplit.gradient_bytes`); None without a section `offload_optimizer`.
        """
        if not self.offload_config:
            return None
        gradient_bytes = (
            MASTER_BYTES if self.info.policy is None and self.cpu_share > 0 else 0
        )
        return round((state_bytes + gradient_bytes) * ((1 - self.cpu_share) * params))

    def describe(self) -> str:
        """Return a line on the offload by DeepSpeed, or by ebbtide's engine in it."""
        if not (self.info.config or self.subgroups or self.stage is not None):
            return ""
        parts = [f"ZeRO-{self.stage}" if self.stage is not None else ""]
        if self.info.policy:
            parts.append(f"updated by ebbtide under {self.info.policy}")
        if self.offload_config:
            parts.append(
                f"optimizer offloaded to the {self.offload_config.get('device')}"
            )
        if self.ratio is not None:
            real = (
                f" configured, {self.real_ratio:.2f} real"
                if self.real_ratio not in (None, self.ratio)
                else ""
            )
            parts.append(f"a share of {self.ratio:g}{real} on the CPU")
        if self.subgroups:
            smallest, largest = (
                count_text(min(self.subgroups)),
                count_text(max(self.subgroups)),
            )
            sizes = (
                f"of {largest}"
                if smallest == largest
                else f"of {smallest} to {largest}"
            )
            parts.append(
                f"{len(self.subgroups)} "
                f"subgroup{'s' if len(self.subgroups) > 1 else ''} {sizes} parameters"
            )
        if self.on_cpu:
            parts.append(f"{sum(self.on_cpu)} of them on the CPU")
        for name, pinned in (
            ("masters", self.info.masters_pinned),
            ("gradients", self.info.gradients_pinned),
        ):
            if pinned is not None:
                parts.append(f"{name} {'pinned' if pinned else 'pageable'}")
        return ", ".join(part for part in parts if part)


def read_setup(values: dict[str, Any]) -> FrameworkSetup:
    """Convert the section of meta.json, each key by itself.

    DeepSpeed and its logs write these values, in forms that differ by version.
    Malformed values count as not recorded.
    """
    valid = {}
    for field in msgspec.structs.fields(DeepSpeedInfo):
        try:
            valid[field.name] = msgspec.convert(values[field.name], field.type)
        except (KeyError, msgspec.ValidationError):
            continue
    return DeepSpeedSetup(DeepSpeedInfo(**valid))


def deepspeed_of(trace: Trace) -> DeepSpeedSetup | None:
    """Return the DeepSpeed setup of a trace; None where none was recorded."""
    setup = framework_setup(trace)
    return setup if isinstance(setup, DeepSpeedSetup) else None
