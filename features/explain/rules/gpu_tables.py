"""Rules about the state of GPUs that monitors print; they are in `gpu_tables.toml`."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.line_formats import file_content
from ebbtide.features.explain.readers.gpu_tables import GpuReading, GpuTable
from ebbtide.features.explain.record import Records
from ebbtide.features.explain.rule_tables import entry_answer, holds
from ebbtide.units import bytes_text, runs_text

# NVML's clocks event reasons of heat: by software, by hardware.
_HEAT_BITS = 0x20 | 0x40
# GPUs whose memory is that of the host.
_SHARING = ("GB10", "Thor", "Orin", "Tegra", "Xavier")
_PROFILE = (
    "ebbtide profile -o run.ebb -- python train.py, then ebbtide findings run.ebb"
)
_QUERY = (
    "nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total,"
    "utilization.gpu,power.draw --format=csv -l 1 > g.csv, then ebbtide import g.csv"
)
_PEAKS = (
    "device",
    "share",
    "used_bytes",
    "total_bytes",
    "memory_activity",
    "power_limit_w",
    "temperature_c",
    "is_uncounted",
)


@rule(40)
def explain_gpu_tables(records: Records) -> Iterator[Result]:
    for table in records.of(GpuTable):
        cards = [_figures(table, readings) for readings in table.by_card().values()]
        names = set()
        for entry in file_content("rules/gpu_tables.toml")["rule"]:
            fitting = [card for card in cards if holds(entry["where"], card)]
            if fitting and entry["name"] not in names:
                names.add(entry["name"])
                yield _answer(table, entry, fitting)
        if "gpu-waits" in names:
            yield OpenQuestion("what the GPU waits for", _PROFILE)
        uses = ("share", "used_bytes", "is_uncounted")
        if cards and not any(card.get(name) for card in cards for name in uses):
            yield OpenQuestion("how much memory is in use", _QUERY)


def _figures(table: GpuTable, readings: list[GpuReading]) -> dict[str, Any]:
    """Return the figures of a GPU over all readings that are known."""
    figures: dict[str, Any] = {
        "readings": len(readings),
        "sharing": any(word in str(readings[0].name) for word in _SHARING),
        "slowed": any((one.throttle_reasons or 0) & _HEAT_BITS for one in readings),
        "utilization": _over(readings, "utilization", fmean),
        "peak_utilization": _over(readings, "utilization", max),
        "power_w": _over(readings, "power_w", fmean),
        **{name: _over(readings, name, max) for name in _PEAKS},
    }
    power, limit = figures["power_w"], figures["power_limit_w"]
    if power and limit:
        figures["power_share"] = power / limit
    processes = [
        one for one in table.processes or () if one.device == figures["device"]
    ]
    sizes = [one.used_bytes for one in processes]
    is_whole = table.processes is not None and readings[0].instance is None
    # A process of Windows or of another container has no size.
    if figures["used_bytes"] and is_whole and None not in sizes:
        figures["unlisted"] = figures["used_bytes"] - sum(filter(None, sizes))
        total = figures["total_bytes"] or figures["used_bytes"]
        figures["unlisted_share"] = figures["unlisted"] / total
    return {name: figure for name, figure in figures.items() if figure is not None}


def _over(readings: list[GpuReading], name: str, join: Any) -> float | None:
    values = [getattr(one, name) for one in readings]
    stated = [value for value in values if value is not None]
    return join(stated) if stated else None


def _answer(
    table: GpuTable, entry: dict[str, Any], cards: list[dict[str, Any]]
) -> Answer:
    words = {**cards[0]}
    devices = {card["device"] for card in cards if "device" in card}
    words["names"] = f"GPU {runs_text(devices)}" if devices else "the GPU"
    words["unlisted"] = bytes_text(words.get("unlisted"))
    words["usage"] = f"{words.get('share', 0):.0%}"
    if {"used_bytes", "total_bytes"} <= words.keys():
        used, total = (bytes_text(words[f"{name}_bytes"]) for name in ("used", "total"))
        words["usage"] = f"{used} of {total} in use ({words['usage']})"
    listed = [one for one in table.processes or () if one.device in devices]
    listed.sort(key=lambda one: -(one.used_bytes or 0))
    if listed:
        texts = [
            f"{one.command[-40:]} ({one.pid or '-'}) {bytes_text(one.used_bytes)}"
            for one in listed[:3]
        ]
        words["listed"] = ", ".join(texts)
    return entry_answer(entry, words, table.place)
