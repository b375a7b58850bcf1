"""Reads what the host tells of its memory: `free`, /proc/meminfo and `numastat`, and
messages of those that ended a job for it.

The lines are those of `host_messages.toml`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.features.explain.line_formats import matching_lines
from ebbtide.features.explain.pasted import PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import bytes_text, parse_bytes

_KIB, _PAGE = 1 << 10, 1 << 12
# The kernel's table has a row for each process.
_MAX_MESSAGES = 20_000
# `free` prints KiB, MiB with -m and GiB with -g: a host has less than 3 TB in MiB.
_UNITS_OF_FREE = ((2e3, 1 << 30), (3e6, 1 << 20), (2e10, _KIB))


@dataclass(frozen=True, kw_only=True)
class HostMemoryTable(Record):
    """Memory of a host in bytes: total, free, available, shared, swap_total and so on.

    Figures that the table does not have are missing.
    """

    sizes: dict[str, int]

    @property
    def title(self) -> str:
        total, available = (self.sizes.get(name) for name in ("total", "available"))
        return f"host memory: {bytes_text(available)} of {bytes_text(total)} available"


@dataclass(frozen=True, kw_only=True)
class HostMessage(Record):
    """A message about the host's memory.

    `kind` is `kill`, `constraint`, `limit` and `task` of the kernel, `sigkill`,
    `group-kill`, `launcher-kill`, `bus-error`, `lock-limit`, `pin-error`, `numa-hit`,
    `numa-miss` or `numa-memory`.
    """

    kind: str
    name: str
    text: str
    values: dict[str, str]

    @property
    def title(self) -> str:
        return self.name

    def size(self, *names: str) -> int:
        """Return the sum of sizes in bytes; those that it does not have count 0."""
        figures = [self.values.get(f"{name}_kib") or "0" for name in names]
        pages = int(self.values.get("rss_pages") or 0) if "rss" in names else 0
        return sum(int(x.replace(",", "")) for x in figures) * _KIB + pages * _PAGE


@reader
def read_host(text: PastedText) -> Iterator[Record]:
    seen: set[tuple[str, str]] = set()
    tables: dict[str, HostMemoryTable] = {}
    earlier: list[HostMemoryTable] = []
    for entry, match, line in matching_lines(text, "readers/host_messages.toml"):
        place = Place(
            text_name=text.name, first_line=line.number, last_line=line.number
        )
        kind = entry["kind"]
        values = {key: value for key, value in match.groupdict().items() if value}
        if kind in ("free", "meminfo"):
            if "total" in values and kind in tables:
                earlier.append(tables.pop(kind))
            table = tables.setdefault(kind, HostMemoryTable(place=place, sizes={}))
            _add_sizes(table.sizes, values, _KIB if kind == "meminfo" else None)
        elif (kind, match[0]) not in seen and len(seen) < _MAX_MESSAGES:
            seen.add((kind, match[0]))
            yield HostMessage(
                place=place,
                kind=kind,
                name=entry["title"],
                text=match[0].strip(),
                values=values,
            )
    for table in (*earlier, *tables.values()):
        sizes = table.sizes
        if {"swap_total", "swap_free"} <= sizes.keys():
            sizes.setdefault("swap_used", sizes["swap_total"] - sizes["swap_free"])
        if "total" in sizes:
            yield table


def _add_sizes(sizes: dict[str, int], words: dict[str, str], unit: int | None) -> None:
    """Add sizes; `unit`: bytes of one without a unit, None for that of the first."""
    for name, word in words.items():
        number = word.rstrip("KMGTPiB")
        if not number.replace(".", "", 1).isdigit():
            continue
        if number != word:
            text = word if word[-1] == "B" else f"{word}B"
            sizes.setdefault(name, parse_bytes(text) if float(number) else 0)
            continue
        scales = (scale for top, scale in _UNITS_OF_FREE if float(number) < top)
        # The first is the total.
        unit = unit or sizes.get("unit") or next(scales, 1)
        sizes.setdefault("unit", unit)
        sizes.setdefault(name, int(float(number) * unit))
