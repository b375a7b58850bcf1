"""Descriptions of the cards that the mock of libnvidia-ml.so.1 shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, eq=False)
class MockInstance:
    """A MIG device of a card."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    total: int = 10 * GIB
    used: int = 4 * GIB


@dataclass(frozen=True, eq=False)
class MockCard:
    """One card. None: the card does not report it.

    Attributes:
        used_high: Bytes in use in the second half of each `wave_ns`.
        h2d: Bytes/s to the card.
        d2h: Bytes/s from the card.
        burst_ns: With it, bytes move only in the first half of each such period.
        counters: The kind of its byte counters: 32 bits (as such, or in a 64-bit
            field), 64 bits, or floating point.
        gpm: Whether it has a performance monitor.
        throughput: Whether it has nvmlDeviceGetPcieThroughput.
        c2c_links: Number of NVLink-C2C links.
        c2c_status: 1 if these are active.
        mig_devices: Its MIG devices, if `mig_mode` is 1.
        lost_ns: Time after nvmlInit at which it falls off the bus.
        live: A file of the stand-in for the CUDA runtime, whose bytes in use and
            counters it has (tests/cuda_runtime).
        errors: Return codes of functions, by their names.
    """

    uuid: str
    name: str = "NVIDIA Mock"
    total: int | None = 80 * GIB
    used: int = 3 * GIB
    used_high: int = 30 * GIB
    wave_ns: int | None = None
    h2d: int = 20_000_000_000
    d2h: int = 3_000_000_000
    burst_ns: int | None = None
    counters: Literal["uint32", "wraps32", "uint64", "double"] | None = None
    gpm: bool = False
    throughput: bool = True
    generation: int | None = 5
    width: int | None = 16
    max_generation: int | None = 5
    max_width: int | None = 16
    utilization: int | None = 87
    memory_utilization: int = 35
    power_mw: int | None = 399_000
    instant_power_mw: int | None = 402_500
    sm_clock_mhz: int | None = 1980
    memory_clock_mhz: int | None = 2619
    temperature_celsius: int | None = 61
    throttle_reasons: int | None = 4
    c2c_links: int | None = None
    c2c_status: int = 1
    mig_mode: int | None = None
    mig_devices: Sequence[MockInstance] = ()
    lost_ns: int | None = None
    live: str | None = None
    errors: dict[str, int] = field(default_factory=dict)

    def bytes_between(
        self, direction: Literal["h2d", "d2h"], start_ns: int, end_ns: int
    ) -> float:
        """Return the bytes that move in a direction in a span of the monotonic
        clock."""
        rate: int = getattr(self, direction)
        return rate * (self._active_ns(end_ns) - self._active_ns(start_ns)) / SECOND_NS

    def _active_ns(self, t_ns: int) -> int:
        if self.burst_ns is None:
            return t_ns
        periods, rest = divmod(t_ns, self.burst_ns)
        return periods * (self.burst_ns // 2) + min(rest, self.burst_ns // 2)


def card_uuid(number: int) -> str:
    """Return a UUID of a card in NVML's notation."""
    return f"GPU-6b1f0000-1111-2222-3333-{number:012x}"


def mig_uuid(number: int) -> str:
    """Return a UUID of a MIG device in NVML's notation."""
    return f"MIG-7c2e0000-4444-5555-6666-{number:012x}"


# Cards as users have them, by the sources that NVML offers there.
A100 = MockCard(
    card_uuid(0xA100),
    "NVIDIA A100-SXM4-80GB",
    generation=4,
    max_generation=4,
    instant_power_mw=None,
    power_mw=311_000,
    sm_clock_mhz=1410,
    memory_clock_mhz=1593,
    h2d=12_500_000_000,
    d2h=1_500_000_000,
)
H100 = MockCard(
    card_uuid(0x100),
    "NVIDIA H100 80GB HBM3",
    wave_ns=400_000_000,
    counters="uint64",
    gpm=True,
    h2d=41_000_000_000,
)
H200 = MockCard(
    card_uuid(0x200),
    "NVIDIA H200",
    total=141 * GIB,
    gpm=True,
    h2d=30_000_000_000,
    d2h=28_000_000_000,
)
GB200 = MockCard(
    card_uuid(0x6B200),
    "NVIDIA GB200",
    total=186 * GIB,
    counters="uint64",
    gpm=True,
    # Copies do not use PCIe, so its counters stand still.
    h2d=0,
    d2h=0,
    c2c_links=10,
    generation=6,
    max_generation=6,
)
# Its driver does not report the links of NVLink-C2C.
GH200 = MockCard(
    card_uuid(0x6200),
    "NVIDIA GH200 480GB",
    total=96 * GIB,
    counters="uint64",
    h2d=0,
    d2h=0,
)
GPM_ONLY = replace(
    H200, uuid=card_uuid(0x201), name="NVIDIA H200 with GPM alone", throughput=False
)
RTX_4090 = MockCard(
    card_uuid(0x4090),
    "NVIDIA GeForce RTX 4090",
    total=24 * GIB,
    used_high=20 * GIB,
    counters="wraps32",
    generation=4,
    width=8,
    max_generation=4,
    throttle_reasons=0,
)
# Its counter moves by 2**32 bytes in 72 ms.
WRAPPING = MockCard(
    card_uuid(0x32),
    "NVIDIA wrapping",
    counters="uint32",
    h2d=60_000_000_000,
    d2h=59_000_000_000,
)
MIG = MockCard(
    card_uuid(0x3160),
    "NVIDIA A100-SXM4-80GB",
    # It counts the traffic of all partitions.
    counters="uint64",
    generation=4,
    max_generation=4,
    mig_mode=1,
    mig_devices=(
        MockInstance(mig_uuid(1), used=2 * GIB),
        MockInstance(mig_uuid(2), used=7 * GIB),
    ),
    utilization=None,
    errors={"nvmlDeviceGetMemoryInfo": 4},
)
VGPU = MockCard(
    card_uuid(0x56),
    "GRID A100D-20C",
    total=20 * GIB,
    used_high=15 * GIB,
    throughput=False,
    generation=None,
    width=None,
    max_generation=None,
    max_width=None,
    power_mw=None,
    instant_power_mw=None,
    temperature_celsius=None,
)
LOST = replace(
    H200, uuid=card_uuid(0x105), name="NVIDIA lost", lost_ns=3 * SECOND_NS // 2
)
_FORBIDDEN = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetPowerUsage",
)
FORBIDDEN = MockCard(
    card_uuid(0xF0),
    "NVIDIA forbidden",
    counters="uint64",
    errors=dict.fromkeys(_FORBIDDEN, 4),
)

# The sampler starts with the first one, which is lost soon.
CARDS = (LOST, A100, H100, H200, GB200, RTX_4090, WRAPPING, MIG, VGPU, FORBIDDEN)


def cuda_device(card: MockCard) -> str:
    """Return the card that a rank of the job uses, as UUID=BYTES: of a partitioned
    card, its last MIG device."""
    used = card.mig_devices[-1] if card.mig_devices else card
    return f"{used.uuid}={used.total}"


def write_description(path: Path, cards: Iterable[MockCard], **settings: Any) -> Path:
    """Write the file that the mock reads from `NVML_MOCK`.

    Args:
        path: The file.
        cards: The cards, in NVML's order.
        settings: `init_error`, the return code of nvmlInit, and `driver`.
    """
    listed = list(cards)
    lines = [
        f"{key}={value}"
        for key, value in (
            {"driver": "580.95.05", "cards": len(listed)} | settings
        ).items()
    ]
    for number, card in enumerate(listed):
        lines += _lines(str(number), card)
    path.write_text("\n".join(lines) + "\n")
    return path


def _lines(prefix: str, described: MockCard | MockInstance) -> Iterator[str]:
    for key, value in vars(described).items():
        if key == "errors":
            yield from (
                f"{prefix}.error.{function}={code}" for function, code in value.items()
            )
        elif key == "mig_devices":
            for number, instance in enumerate(value):
                yield from _lines(f"{prefix}.{number}", instance)
        elif value is not None and value is not False:
            yield f"{prefix}.{key}={int(value) if isinstance(value, bool) else value}"
