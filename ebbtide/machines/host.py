"""Hosts: CPU, memory and link of the box that holds GPUs.

Also their description in one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ebbtide.errors import MachineError
from ebbtide.machines.machine import MAX_RANKS
from ebbtide.units import parse_bytes

EXAMPLE = "ddr5-2ch,16-cores,pcie4x16,256GB"
GRAMMAR = (
    "parts separated by commas, in any order: memory (ddr4-8ch, ddr5-5600-2ch with "
    "MT/s, lpddr5x-512GB/s, "
    "hbm3-5300GB/s), 16-cores, pcie4x16, nvlink-c2c or unified, the size of memory "
    "(256GB), 2-sockets, 4-ranks, links of the box to others (8x400Gbit)"
)
# The link of a GPU that shares the memory of the CPU.
UNIFIED = "unified"
# MT/s where none is given; a channel carries 8 bytes a transfer.
_DDR_TRANSFERS = {"ddr4": 3200, "ddr5": 4800}
_CHANNEL_BYTES = 8
_MAX_CHANNELS, _MAX_TRANSFERS = 64, 12_800
_MOST = {"core": 4096, "socket": 16, "rank": MAX_RANKS}
_MIN_BYTES, _MAX_BYTES = 1e9, 1e15
# GB/s of a lane in one direction, after its coding.
_LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# 900 GB/s in both directions, by the data sheet of the GH200.
_NVLINK_C2C_BYTES_PER_S = 450e9


@dataclass(frozen=True)
class Host:
    """A box that holds GPUs; None is not stated."""

    # Memory of all sockets: kind and channels (`ddr5-4800-16ch`) or peak
    # (`lpddr5x-512gb/s`).
    memory: str | None = None
    memory_bytes: int | None = None  # Size of the memory.
    cores: int | None = None  # Cores of all sockets.
    link: str | None = None  # Link of each GPU: `pcie4x16`, `nvlink-c2c` or `unified`.
    sockets: int | None = None  # CPUs.
    ranks: int | None = None  # Ranks, each with a GPU, that share the box.
    network: str | None = None  # Links of the box to others: `8x400gbit`.

    def over(self, other: Host) -> Host:
        """Return this host with what it does not state taken from another one.

        CPUs are taken only together with their cores.
        """
        stated = {key: value for key, value in vars(self).items() if value is not None}
        sockets = other.sockets if self.memory is None and self.cores is None else None
        return replace(other, **{"sockets": sockets, **stated})

    @property
    def spec(self) -> str:
        """The host in one line, as `parse_host` reads it."""
        parts = [
            self.memory and self.memory.replace("gb/s", "GB/s"),
            self.cores and _count_text(self.cores, "core"),
            self.sockets and _count_text(self.sockets, "socket"),
            self.link,
            self.memory_bytes and _size_text(self.memory_bytes),
            self.ranks and _count_text(self.ranks, "rank"),
            self.network and self.network.replace("gbit", "Gbit"),
        ]
        return ",".join(str(part) for part in parts if part)


def parse_host(spec: str) -> Host:
    """Parse a host such as `ddr5-2ch,16-cores,pcie4x16,256GB`. Raises MachineError for
    any other part."""
    values: dict[str, str | int] = {}
    for part in spec.lower().split(","):
        stated = _parse_part(part.strip())
        if stated is None or stated.keys() & values.keys():
            problem = "is not a part of a host" if stated is None else "is stated twice"
            raise MachineError(
                f"host {spec!r:.80}: {part.strip()!r:.40} {problem}; write {GRAMMAR}; "
                f"e.g. {EXAMPLE}"
            )
        values |= stated
    return Host(**values)  # type: ignore[arg-type]


def memory_rate(memory: str) -> tuple[str, float]:
    """Return the kind of a memory, as in `ddr5`, and its peak in bytes/s."""
    kind, *rest = memory.split("-")
    if kind not in _DDR_TRANSFERS:
        return kind, float(rest[0].removesuffix("gb/s")) * 1e9
    transfers, channels = int(rest[0]), int(rest[1].removesuffix("ch"))
    return kind, transfers * 1e6 * _CHANNEL_BYTES * channels


def link_bytes_per_s(link: str) -> float:
    """Return the peak of a link in one direction."""
    if link == "nvlink-c2c":
        return _NVLINK_C2C_BYTES_PER_S
    generation, width = _pcie(link)
    return _LANE_GB_PER_S[generation] * width * 1e9


def network_bytes_per_s(network: str) -> float:
    """Return the peak of the links of a box to others in one direction."""
    links, rate = network.removesuffix("gbit").split("x")
    return int(links) * int(rate) * 1e9 / 8


def slower_link(gpu: str, host: str) -> str:
    """Return the link that a GPU and a host agree on: the smaller generation and the
    smaller width.

    Raises MachineError where only one of them has NVLink-C2C or unified memory.
    """
    if UNIFIED in (gpu, host):
        if gpu != host:
            raise MachineError(
                "a GPU and its CPU share their memory or do not: write the link of "
                f"this GPU, {gpu}"
            )
        return host
    if host == "nvlink-c2c":
        if gpu != host:
            raise MachineError(
                f"this GPU has no NVLink-C2C: write its link to the host, e.g. {gpu}"
            )
        return host
    if gpu == "nvlink-c2c":
        return host
    generation, width = map(min, zip(_pcie(gpu), _pcie(host), strict=True))
    return f"pcie{generation}x{width}"


def _count_text(number: int, unit: str) -> str:
    return f"{number}-{unit}{'s' if number > 1 else ''}"


def _size_text(size: int) -> str:
    """Return the size in the largest unit in which it is a whole number, so that it
    reads back as it is."""
    units = ((2**30, "GiB"), (10**9, "GB"), (2**20, "MiB"), (10**6, "MB"))
    return next(
        (f"{size // scale}{unit}" for scale, unit in units if not size % scale),
        str(size),
    )


def _pcie(link: str) -> tuple[int, int]:
    generation, width = link.removeprefix("pcie").split("x")
    return int(generation), int(width)


def _parse_part(part: str) -> dict[str, str | int] | None:
    """Return the values that a part states; None if it is none."""
    if part in ("nvlink-c2c", UNIFIED) or re.fullmatch(
        r"pcie[3-6]x(1|2|4|8|16)", part, re.ASCII
    ):
        return {"link": part}
    if match := re.fullmatch(r"(ddr[45])(?:-(\d{4,5}))?-(\d{1,2})ch", part, re.ASCII):
        kind, transfers, channels = (
            match[1],
            int(match[2] or _DDR_TRANSFERS[match[1]]),
            int(match[3]),
        )
        if (
            not 1 <= channels <= _MAX_CHANNELS
            or not 1000 <= transfers <= _MAX_TRANSFERS
        ):
            return None
        return {"memory": f"{kind}-{transfers}-{channels}ch"}
    if re.fullmatch(r"(lpddr5x|hbm3)-[1-9]\d{1,4}gb/s", part, re.ASCII):
        return {"memory": part}
    if re.fullmatch(r"[1-9]\d?x[1-9]\d{0,3}gbit", part, re.ASCII):
        return {"network": part}
    if match := re.fullmatch(r"(\d{1,4})-(core|socket|rank)s?", part, re.ASCII):
        number = int(match[1])
        return {f"{match[2]}s": number} if 1 <= number <= _MOST[match[2]] else None
    try:
        size = parse_bytes(part)
    except ValueError:
        return None
    return {"memory_bytes": size} if _MIN_BYTES <= size <= _MAX_BYTES else None
