"""The split of DeepSpeed's partial offload (Twin-Flow), which differs between
versions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.analysis.metrics.state_split import StateSplit
from ebbtide.state_bytes import MASTER_BYTES


@dataclass(frozen=True)
class DeepSpeedSplit(StateSplit):
    """The split of a version, written like `0.13.3+c7da512a`; empty: a current one.

    From 0.18 on, subgroup i is resident where i < int((1 - ratio) * subgroups): the
    first ones. Up to 0.17, subgroup i is on the CPU where i < int(ratio * subgroups):
    the last ones are resident (runtime/zero/stage3.py of each)."""

    version: str = ""

    def resident(self, ratio: float, subgroups: int) -> range:
        """Return the numbers of the subgroups whose state and update Twin-Flow keeps on
        the GPU."""
        if residents_are_last(self.version):
            return range(int(ratio * subgroups), subgroups)
        return super().resident(ratio, subgroups)

    def gradient_bytes(
        self, resident: Sequence[int], grad_bytes: float, offloads: bool
    ) -> float:
        """Return the bytes of gradients of resident subgroups that ZeRO-3 always keeps
        on the device.

        With `offload_optimizer` each subgroup has a gradient in fp32. Without, all have
        a buffer of `grad_bytes` a parameter, and at the step the gradient of one
        subgroup is made flat and fp32 (runtime/zero/stage3.py,
        `initialize_optimizer_states` and `_prepare_fp32_grad_for_sub_group`; the same
        in all versions with Twin-Flow that were read, 0.12.4 to 0.19.8).
        """
        if offloads:
            return super().gradient_bytes(resident, grad_bytes, offloads)
        return grad_bytes * sum(resident) + (grad_bytes + MASTER_BYTES) * max(
            resident, default=0
        )


def version_numbers(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a version to compare: (0, 13, 3) for `0.13.3+c7da512a`;
    empty where it is not known."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def residents_are_last(version: str | None) -> bool:
    """Return whether a version rounds down the subgroups on the CPU, not on the GPU.

    Its resident subgroups are then the last ones instead of the first.
    """
    numbers = version_numbers(version)
    return bool(numbers) and numbers < (0, 18)
