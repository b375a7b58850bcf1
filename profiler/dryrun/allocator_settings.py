"""Settings of torch's caching allocator, which a job takes from its environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ebbtide.profiler.dryrun.errors import DryRunError

# In the order of their priority, as in c10/cuda/CUDAAllocatorConfig.h.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MIB = 1 << 20
# Sizes are rounded by the power of two below them, from 1 MiB on.
_INTERVALS = 16
_ENTRY = re.compile(r"(\w+):(\[[^\]]*\]|[^,]+)")


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the allocator.

    Attributes:
        expandable: Whether segments grow (`expandable_segments`).
        max_split_bytes: Blocks of this size and more are not split; None: all are.
        divisions: Steps between two powers of two to which sizes are rounded, by the power of two from 1 MiB on;
            1 or less: sizes are not rounded so.
        ignored: Names of settings that have no effect on the simulation.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Return the settings of the environment.

        Raises:
            DryRunError: A setting has a value that torch refuses.
        """
        name = next((name for name in VARIABLES if name in os.environ), None)
        if name is None:
            return cls()
        try:
            return cls._parse(os.environ[name].replace(" ", ""))
        except (ValueError, IndexError) as error:
            raise DryRunError(f"{name} is {os.environ[name]!r}, which torch cannot read: correct it") from error

    @classmethod
    def _parse(cls, text: str) -> AllocatorSettings:
        entries = _ENTRY.findall(text)
        if ",".join(f"{key}:{value}" for key, value in entries) != text.strip(","):
            raise ValueError(text)
        expandable, max_split_bytes, divisions, ignored = False, None, cls.divisions, []
        for key, value in entries:
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise ValueError(value)
                expandable = value == "True"
            elif key == "max_split_size_mb":
                max_split_bytes = int(value) * _MIB
            elif key == "roundup_power2_divisions":
                divisions = _divisions(value)
            else:
                ignored.append(key)
        return cls(expandable, max_split_bytes, divisions, tuple(ignored))

    @property
    def description(self) -> str:
        """The settings that are not the default ones, in words."""
        words = ["expandable_segments"] if self.expandable else []
        if self.max_split_bytes is not None:
            words.append(f"max_split_size {self.max_split_bytes >> 20:,} MiB")
        if any(self.divisions):
            words.append("roundup_power2_divisions")
        words += [f"{name} (has no effect here)" for name in self.ignored]
        return ", ".join(words)

    def divisions_of(self, size: int) -> int:
        """Return the steps to which a size is rounded."""
        return self.divisions[min(max(size.bit_length() - _MIB.bit_length(), 0), _INTERVALS - 1)]


def _divisions(value: str) -> tuple[int, ...]:
    """Return the steps of each interval, from a number for all or a list as `[256:1,512:2,>:8]` of sizes in MiB."""
    if not value.startswith("["):
        return (int(value),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, 0
    for position, entry in enumerate(value[1:-1].split(",")):
        bound, _, steps = entry.partition(":")
        if bound == ">":
            divisions[last:] = [int(steps)] * (_INTERVALS - last)
            continue
        last = min(int(bound).bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            divisions[:last] = [int(steps)] * last
        divisions[last] = int(steps)
    return tuple(divisions)
