"""The setup of a DeepSpeed job, with figures computed from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebbtide.json_files import section

if TYPE_CHECKING:
    # Policies import this module in training jobs, which need no tables.
    from ebbtide.profiler.trace import Trace
    from ebbtide.profiler.trace.metadata import DeepSpeedInfo

# DeepSpeed's default of offload_optimizer.buffer_count (runtime/zero/offload_config.py).
DEFAULT_SWAP_BUFFERS = 4


@dataclass(frozen=True)
class DeepSpeedSetup:
    """The setup of DeepSpeed on the first rank."""

    info: DeepSpeedInfo  # The recorded values; None or empty where they were not recorded.

    @property
    def zero_config(self) -> dict[str, Any]:
        """The section `zero_optimization` of the user's configuration; empty where there is none."""
        return section(self.info.config, "zero_optimization")

    @property
    def offload_config(self) -> dict[str, Any]:
        """The section `zero_optimization.offload_optimizer` of the configuration; empty where there is none."""
        return section(self.zero_config, "offload_optimizer")

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO, as recorded, else as configured."""
        if self.info.stage is not None:
            return self.info.stage
        stage = self.zero_config.get("stage")
        return stage if isinstance(stage, int) else None

    @property
    def ratio(self) -> float | None:
        """The configured share of the parameters that the CPU updates (Twin-Flow); None where nothing is offloaded."""
        if self.offload_config.get("device") not in ("cpu", "nvme"):
            return None
        # ZeRO-1 and ZeRO-2 do not have a ratio: they offload everything.
        if self.stage in (1, 2):
            return 1.0
        ratio = self.offload_config.get("ratio", 1.0)
        return float(ratio) if isinstance(ratio, (int, float)) and 0 <= ratio <= 1 else None

    @property
    def subgroups(self) -> tuple[int, ...]:
        """Parameters of each subgroup, padding included; empty where they were not recorded."""
        return self.info.subgroup_params

    @property
    def on_cpu(self) -> tuple[bool, ...]:
        """Whether the state of each subgroup is in host memory; empty where that was not recorded."""
        devices = self.info.subgroup_devices
        return (
            tuple(device.partition(":")[0] == "cpu" for device in devices)
            if len(devices) == len(self.subgroups)
            else ()
        )

    @property
    def real_ratio(self) -> float | None:
        """The share of the parameters whose state is in host memory, as recorded: a sum of whole subgroups."""
        if not self.on_cpu:
            return None
        return sum(size for size, on_cpu in zip(self.subgroups, self.on_cpu, strict=True) if on_cpu) / sum(
            self.subgroups
        )

    @property
    def rounded_ratio(self) -> float | None:
        """The share that the configured ratio gives when it is rounded to whole subgroups, by the rule of the version.
        None where ratio or subgroups were not recorded, and for stages that do not split between subgroups."""
        if self.ratio is None or not self.subgroups or self.stage != 3:
            return None
        on_gpu = resident_range(self.ratio, len(self.subgroups), self.info.version)
        total = sum(self.subgroups)
        return (total - sum(self.subgroups[on_gpu.start : on_gpu.stop])) / total

    @property
    def cpu_share(self) -> float:
        """The share whose state is in host memory: as recorded, else as configured (in whole subgroups), else 1."""
        for share in (self.real_ratio, self.rounded_ratio, self.ratio):
            if share is not None:
                return share
        return 1.0


def deepspeed_of(trace: Trace) -> DeepSpeedSetup | None:
    """Return the DeepSpeed setup of a trace; None where none was recorded."""
    return DeepSpeedSetup(trace.meta.deepspeed) if trace.meta.deepspeed is not None else None


def resident_subgroups(ratio: float, subgroups: int, version: str | None = None) -> int:
    """Return how many subgroups Twin-Flow keeps on the GPU, state and update, as DeepSpeed rounds them. `ratio` is the
    share of the parameters to update on the CPU, `version` as in `0.13.3+c7da512a`; None: a current one.

    From 0.18 on, subgroup i is resident where i < int((1 - ratio) * subgroups): the first ones. Up to 0.17, subgroup i
    is on the CPU where i < int(ratio * subgroups): the last ones are resident (runtime/zero/stage3.py of each). The
    products are floating point as in DeepSpeed: (1 - 0.9) * 10 is just less than 1, so none is resident."""
    return subgroups - int(ratio * subgroups) if residents_are_last(version) else int((1 - ratio) * subgroups)


def resident_range(ratio: float, subgroups: int, version: str | None = None) -> range:
    """Return the numbers of the subgroups that Twin-Flow keeps on the GPU (see `resident_subgroups`)."""
    count = resident_subgroups(ratio, subgroups, version)
    return range(subgroups - count, subgroups) if residents_are_last(version) else range(count)


def version_numbers(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a version to compare: (0, 13, 3) for `0.13.3+c7da512a`; empty where it is not known."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def residents_are_last(version: str | None) -> bool:
    """Return whether the version rounds down the subgroups on the CPU instead of those on the GPU. Its resident
    subgroups are then the last ones instead of the first."""
    numbers = version_numbers(version)
    return bool(numbers) and numbers < (0, 18)
