"""A framework that splits the optimizer state, as a feature: its setup has the values
of its section in meta.json."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ebbtide.analysis.metrics.state_split import Framework, StateSplit
from ebbtide.seams import Feature
from ebbtide.state_bytes import MASTER_BYTES

FEATURE = Feature(
    "stub",
    {
        "setups": {"stub": "stub_framework:read_setup"},
        "splits": {"stub": "stub_framework:LastSubgroups"},
    },
)


class LastSubgroups(StateSplit):
    """The split of a framework that keeps the last subgroups on the device; its version
    is their number."""

    def __init__(self, version: str) -> None:
        self.count = int(version)

    def resident(self, ratio: float, subgroups: int) -> range:
        """Return the last subgroups, whatever the ratio is."""
        return range(subgroups - self.count, subgroups)


class StubSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A `FrameworkSetup`."""

    ratio: float | None = None
    version: str | None = None
    subgroups: tuple[int, ...] = ()
    subgroup_params: int | None = None
    recorded_policy: str | None = None
    key: ClassVar[str] = "stub"
    name: ClassVar[str] = "Stub"
    policy: ClassVar[None] = None
    stage: ClassVar[None] = None
    checkpointing: ClassVar[None] = None
    host_buffer_bytes: ClassVar[None] = None
    config: ClassVar[dict[str, Any]] = {}

    @property
    def recorded(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    @property
    def cpu_share(self) -> float:
        return 1.0 if self.ratio is None else self.ratio

    @property
    def offloads(self) -> bool:
        return self.cpu_share > 0

    @property
    def framework(self) -> Framework | None:
        return None if self.version is None else Framework(self.key, self.version)

    def state_on_device(self, params: int, state_bytes: float) -> int | None:
        return round((state_bytes + MASTER_BYTES) * (1 - self.cpu_share) * params)

    def describe(self) -> str:
        return f"a share of {self.cpu_share:g} on the CPU"


def read_setup(section: dict[str, Any]) -> StubSetup:
    """Read the section `stub` of meta.json."""
    return msgspec.convert(section, StubSetup)
