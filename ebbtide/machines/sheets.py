"""Figures of GPUs and hosts, the source of each (`sheets.toml`), and the shares of
their peaks that jobs reach."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from ebbtide.machines.host import UNIFIED, Host, parse_host
from ebbtide.machines.machine import GpuCompute

_TERA = 1e12
_TFLOPS_KEYS = ("float32", "tf32", "float16", "float8")


class FigureSource(NamedTuple):
    """The document that has a figure, and the day on which it was read."""

    title: str
    date: str


class Share(NamedTuple):
    """The share of a peak that jobs reach, or another value of no data sheet."""

    value: float  # The most likely value.
    # The factor within which it is: one standard error, normal in the logarithm.
    factor: float
    source: FigureSource


@dataclass(frozen=True)
class GpuSheet:
    """A GPU as its data sheet describes it."""

    memory_gib: float  # Memory as torch reports it, GiB.
    compute: GpuCompute  # Name, compute capability and peak rates.
    # Its link to the host: `pcie4x16`, `nvlink-c2c`, or `unified` if it shares the
    # memory of the CPU.
    link: str
    # Measured copies to the device and to the host by NVLink-C2C, bytes/s; None: not
    # measured.
    c2c: tuple[Share, Share] | None
    # FigureSource of each figure by its key in a machine file; of `c2c` under that
    # name.
    sources: dict[str, FigureSource]
    multiprocessors: int | None = None  # None: not known.
    # Memory that the system takes where GPU and CPU share it, GiB, and its source.
    system_gib: float = 0.0
    system_source: FigureSource | None = None
    price_usd: int | None = None  # At its launch; None: none was published.
    price_source: FigureSource | None = None
    other_names: tuple[str, ...] = ()  # As people write it, beside its own.


class HostSheet(NamedTuple):
    """A host and where it is described."""

    cpu: str
    host: Host
    source: FigureSource


def _gpu(values: dict[str, Any], sources: dict[str, FigureSource]) -> GpuSheet:
    named = values.get("sources", {})

    def source(key: str) -> FigureSource:
        return sources[named.get(key, values["source"])]

    peaks = dict(zip(_TFLOPS_KEYS, values["tflops"], strict=False))
    peaks["bfloat16"] = values.get("bf16", peaks["float16"])
    peer_gb_per_s, c2c = values.get("peer_gb_per_s"), values.get("c2c")
    compute = GpuCompute(
        name=values["name"],
        compute_capability=values.get("capability"),
        flops_per_s={key: value * _TERA for key, value in peaks.items()},
        memory_bytes_per_s=values["memory_gb_per_s"] * 1e9,
        peer_bytes_per_s=peer_gb_per_s and peer_gb_per_s * 1e9,
    )
    figures = {
        "gpu_memory_bytes": source("memory_gib"),
        "gpu.memory_bytes_per_s": source("memory_gb_per_s"),
        **{f"gpu.flops_per_s.{key}": source("tflops") for key in compute.flops_per_s},
    }
    if peer_gb_per_s:
        figures["gpu.peer_bytes_per_s"] = source("peer_gb_per_s")
    rates = None
    if c2c is not None:
        h2d, d2h = (
            Share(rate * 1e9, factor, source("c2c"))
            for rate, factor in zip(c2c["gb_per_s"], c2c["factors"], strict=True)
        )
        rates = h2d, d2h
    price_usd = values.get("price_usd")
    return GpuSheet(
        values["memory_gib"],
        compute,
        values["link"],
        rates,
        figures,
        multiprocessors=values.get("sms"),
        system_gib=values.get("system_gib", 0.0),
        system_source=source("system_gib") if "system_gib" in values else None,
        price_usd=price_usd,
        price_source=source("price_usd") if price_usd else None,
        other_names=tuple(values.get("also", ())),
    )


_FILE = tomllib.loads(
    resources.files("ebbtide.machines")
    .joinpath("sheets.toml")
    .read_text(encoding="utf-8")
)
_SOURCES = {key: FigureSource(*values) for key, values in _FILE["sources"].items()}
GPU_SHEETS = {name: _gpu(values, _SOURCES) for name, values in _FILE["gpus"].items()}
DEFAULT_HOSTS = {
    name: HostSheet(cpu, parse_host(spec), _SOURCES[key])
    for name, (cpu, spec, key) in _FILE["hosts"].items()
}
SHARES = {
    name: Share(value, factor, _SOURCES[key])
    for name, (value, factor, key) in _FILE["shares"].items()
}
# Words of makers and brands, which people leave out.
_BRANDS = re.compile(
    r"nvidia|geforce|tesla|quadro|amd|radeon|instinct|generation|edition|gpu"
)


def plain_name(name: str) -> str:
    """Return the letters and digits of a GPU's name without the words of its maker."""
    return re.sub(r"[^a-z0-9]", "", _BRANDS.sub("", name.lower()))


def _names_of(preset: str, sheet: GpuSheet) -> Iterator[str]:
    for name in (preset, sheet.compute.name or "", *sheet.other_names):
        plain = plain_name(name)
        yield plain
        yield plain.removeprefix("rtx")


# The presets by all names that people write.
PRESET_NAMES = {
    name: preset
    for preset, sheet in GPU_SHEETS.items()
    for name in _names_of(preset, sheet)
}
# GPUs without a preset that share the memory of their CPU.
_UNIFIED_NAMES = re.compile(r"orin|xavier|thor|applem\d|8060s|8050s")


def preset_of(name: str | None) -> GpuSheet | None:
    """Return the data sheet of a GPU by its name; None: there is none."""
    return GPU_SHEETS.get(PRESET_NAMES.get(plain_name(name or ""), ""))


def shares_host_memory(name: str | None) -> bool | None:
    """Return whether the GPU of a name has the memory of its CPU; None: not known."""
    sheet = preset_of(name)
    if sheet is not None:
        return sheet.link == UNIFIED
    return True if _UNIFIED_NAMES.search(plain_name(name or "")) else None


def system_memory_text(sheet: GpuSheet) -> str:
    """Return what the system takes of the memory that GPU and CPU share."""
    source = "" if sheet.system_source is None else f" ({sheet.system_source.title})"
    return (
        f"system, page cache, Python and display take {sheet.system_gib:g} of its "
        f"{sheet.memory_gib:.1f} GiB{source}"
    )
