"""Reads the state of GPUs as monitors print it, once or repeatedly.

The lines of each tool are those of `gpu_formats.toml`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ebbtide.features.explain.line_formats import file_content, matching_lines
from ebbtide.features.explain.pasted import PastedLine, PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import counted

# A text of more is a recording: `ebbtide import` reads it.
_MAX_READINGS = 20_000
_FORMATS = "readers/gpu_formats.toml"
_UNIT = re.compile(r"\s*[\[(]([^\])]{1,20})[\])]$")
_NUMBER = re.compile(
    r"(0x[0-9a-fA-F]{1,16}|\d{1,18}(?:\.\d{1,9})?)(?:/\s*[\d.]{1,18})?\s?([KMGT]?i?B)?"
)
# What tools call MB is MiB.
_SCALES = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NO_VALUE = re.compile(r"N/A|Not Supported|Unknown", re.IGNORECASE)
_TEXTS = {"name", "time", "command"}
_COUNTS = {"device", "instance", "pid", "throttle_reasons"}
_PERCENTAGES = {"utilization", "memory_activity", "used_share"}


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """The state of a GPU, or of an instance of one (MIG), at one time.

    Shares are from 0 to 1; None: the table does not say.
    """

    device: int | None = None
    instance: int | None = None
    name: str | None = None
    time: str | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_share: float | None = None
    utilization: float | None = None
    # Share of the time in which its memory was read or written.
    memory_activity: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: int | None = None
    # Whether the table says that the driver does not count its memory.
    is_uncounted: bool = False

    @property
    def share(self) -> float | None:
        """Return the share of the memory in use."""
        if self.used_bytes is None:
            return self.used_share
        total = self.total_bytes or self.used_bytes + (self.free_bytes or 0)
        return self.used_bytes / total if total > self.used_bytes else self.used_share


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process on a GPU."""

    device: int | None = None
    pid: int | None = None
    command: str = ""
    used_bytes: int | None = None


Card = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class GpuTable(Record):
    """Readings of GPUs by one tool, in their order, and the last list of processes.

    `processes` is None where the tool prints no list.
    """

    program: str
    readings: tuple[GpuReading, ...]
    processes: tuple[GpuProcess, ...] | None

    @property
    def title(self) -> str:
        names = [one.name for one in self.readings if one.name]
        name = f" ({names[0]})" if names else ""
        times = counted(len(self.readings), "reading")
        return (
            f"{times} of {counted(len(self.by_card()), 'GPU')}{name} by {self.program}"
        )

    def by_card(self) -> dict[Card, list[GpuReading]]:
        """Return the readings of each GPU or instance."""
        cards: dict[Card, list[GpuReading]] = {}
        for one in self.readings:
            cards.setdefault((one.device, one.instance), []).append(one)
        return cards


@cache
def _fields() -> dict[str, str]:
    """Return the field of each name that tools give to a figure."""
    names = file_content(_FORMATS)["names"]
    return {name: field_name for field_name in names for name in names[field_name]}


def _figure(name: str, value: str, unit: str = "") -> dict[str, Any]:
    """Return a field with its value; nothing where the tool does not know it."""
    if name in _TEXTS:
        return {name: value.strip()}
    match = _NUMBER.match(value.strip())
    if match is None:
        is_uncounted = name == "used_bytes" and _NO_VALUE.search(value)
        return {"is_uncounted": True} if is_uncounted else {}
    if match[1].startswith("0x"):
        return {name: int(match[1], 16)}
    number = float(match[1])
    if name in _COUNTS:
        return {name: int(number)}
    if name.endswith("_bytes"):
        letter = (match[2] or unit or "MB")[0].upper()
        scale = _SCALES.get(letter, 1 << 20)
        return {name: int(number * scale)}
    return {name: number / 100 if name in _PERCENTAGES else number}


@dataclass
class _Draft:
    """The tables of one tool as far as they were read."""

    program: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    processes: list[GpuProcess] | None = None
    numbers: list[int] = field(default_factory=list)

    def add(self, kind: str, values: dict[str, Any], number: int) -> None:
        if kind == "pair" and not values:
            return
        self.numbers.append(number)
        if len(self.rows) > _MAX_READINGS:
            return
        if kind == "table":
            self.processes = None
        elif kind in ("process", "none"):
            self.processes = self.processes or []
            if self.rows:
                values.setdefault("device", self.rows[-1].get("device"))
            if "command" in values and "device" in values:
                self.processes.append(GpuProcess(**values))
        elif kind == "card" or [*values] == ["device"]:
            self.rows.append(values)
        elif kind == "first":
            if self.rows:
                self.rows[-1] = values | self.rows[-1]
        else:
            self._add_to_card(values)

    def _add_to_card(self, values: dict[str, Any]) -> None:
        """Add to the last reading of a card, or to one that does not say which."""
        card = values.get("device"), values.get("instance")
        rows = (
            row
            for row in reversed(self.rows[-64:])
            if card[0] is None
            or (row.get("device"), row.get("instance")) == card
            or "device" not in row
        )
        row = next(rows, None)
        if row is None:
            self.rows.append(values)
        else:
            row.update(values)

    def table(self, text: PastedText) -> Iterator[GpuTable]:
        if not self.numbers:
            return
        place = Place(
            text_name=text.name,
            first_line=self.numbers[0],
            last_line=self.numbers[-1],
        )
        processes = None if self.processes is None else tuple(self.processes)
        if self.rows or processes:
            readings = tuple(GpuReading(**row) for row in self.rows)
            yield GpuTable(
                place=place,
                program=self.program,
                readings=readings,
                processes=processes,
            )


@reader
def read_lines(text: PastedText) -> Iterator[GpuTable]:
    """Read the lines that have a format of their own."""
    drafts: dict[str, _Draft] = {}
    for entry, match, line in matching_lines(text, _FORMATS):
        draft = drafts.setdefault(entry["program"], _Draft(entry["program"]))
        draft.add(entry["kind"], _values_of(match), line.number)
    for draft in drafts.values():
        yield from draft.table(text)


def _values_of(match: re.Match[str]) -> dict[str, Any]:
    """Return the fields that the groups of a match have."""
    groups = {name: text for name, text in match.groupdict().items() if text}
    key, value = groups.pop("key", ""), groups.pop("value", "")
    values = _named(key, value)
    for name, text in groups.items():
        values |= _figure(name, text)
    return values


def _named(name: str, value: str) -> dict[str, Any]:
    """Return the field that a tool calls by a name; none for another name."""
    bare, unit = _without_unit(name)
    field_name = _fields().get(bare)
    return {} if field_name is None else _figure(field_name, value, unit)


def _without_unit(name: str) -> tuple[str, str]:
    unit = _UNIT.search(name)
    bare = name if unit is None else name[: unit.start()]
    return bare.strip().lower(), "" if unit is None else unit[1]


@reader
def read_columns(text: PastedText) -> Iterator[GpuTable]:
    """Read tables whose columns have names, and queries without a header by their
    units."""
    draft = _Draft("nvidia-smi")
    names: list[str] = []
    for line in text.lines:
        header = _header(line.text)
        names = names if header is None else header
        is_row = header is None and line.text[:1] != "#"
        if is_row and not _add_row(draft, names, line):
            names = []
            _add_row(draft, _names_by_unit(line.text), line)
        if len(draft.rows) > _MAX_READINGS:
            break
    yield from draft.table(text)


def _header(line: str) -> list[str] | None:
    """Return the names of columns; None for any other line."""
    line = line.removeprefix("\\")
    is_comment = line[:1] == "#"
    if query := _QUERY.search(line):
        return query[1].lower().split(",")
    if not is_comment and line.count(",") == 0:
        return None
    words = line.lstrip("# ").split() if is_comment else line.split(",")
    names = [word.strip().lower() for word in words]
    fields = _fields()
    count = sum(_without_unit(name)[0] in fields for name in names[:40])
    return names if count >= 2 else None


def _add_row(draft: _Draft, names: list[str], line: PastedLine) -> bool:
    """Add a row below names; return whether it is one."""
    values = line.text.split(",") if "," in line.text else line.text.split()
    if not names or len(values) < len(names):
        return False
    row: dict[str, Any] = {}
    for name, value in zip(names, values, strict=False):
        row |= _named(name, value)
    if "pid" not in names:
        if row.keys() - {"device", "name", "time"}:
            draft.add("card", row, line.number)
    elif "pid" in row:
        fields = {name: row.get(name) for name in _PROCESS_FIELDS}
        draft.add("process", fields, line.number)
    return True


# A command says which columns the rows without a header below it have.
_QUERY = re.compile(r"nvidia-smi\b.{0,80}--query-gpu=([\w.,]{3,400})")
_PROCESS_FIELDS = ("device", "pid", "command", "used_bytes")
_BARE = re.compile(
    r"(?P<percent>\d{1,3} %)|(?P<size>\d{1,7} MiB)|(?P<watts>[\d.]{1,8} W)"
    r"|(?P<name>(?:NVIDIA|Tesla|GeForce|Quadro) [\w -]{1,50})"
    r"|(?P<time>\d{4}/\d\d/\d\d [\d:.]{8,12})"
    r"|\d{1,5} MHz|P\d\d?|\d{1,4}|[\dA-F:.]{12,16}|GPU-[\da-f-]{36}"
    r"|\[?(?:N/A|Not Supported)\]?"
)
_NAMES_OF_UNIT = {
    "percent": ["utilization.gpu", "utilization.memory"],
    "watts": ["power.draw", "power.limit"],
    "name": ["name"],
    "time": ["timestamp"],
}


def _names_by_unit(line: str) -> list[str]:
    """Return the names that the columns of a row would have; none for another line.

    Of two sizes and more the largest is the total. A single one has no name: it may be
    either.
    """
    values = [value.strip() for value in line.split(",", 30)]
    matches = [_BARE.fullmatch(value) for value in values]
    if len(values) < 2 or None in matches:
        return []
    kinds = [match.lastgroup or "" for match in matches if match is not None]
    left = {kind: [*names] for kind, names in _NAMES_OF_UNIT.items()}
    sizes = [int(value.split()[0]) for value in values if value.endswith("MiB")]
    total = max(sizes) if len(sizes) > 1 else None
    left["size"] = [] if total is None else ["memory.used"]
    names = []
    for kind, value in zip(kinds, values, strict=True):
        is_total = kind == "size" and int(value.split()[0]) == total
        of_kind = left.get(kind)
        names.append("memory.total" if is_total else of_kind.pop(0) if of_kind else "")
    return names if "utilization.gpu" in names or total is not None else []
