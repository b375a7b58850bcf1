"""The lines of a training log, with the time of each."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ebbtide.profiler.importers.source import Source

# Lines longer than this are not log lines; they are read in pieces, so that no file fills the memory.
_LONGEST = 1 << 16
_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TIME = r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)[.,](\d{3,9})"
# Launchers put the host's name before it, and ranks may break into each other's lines: it may stand anywhere.
_STAMP = re.compile(rf"\[{_TIME}\]")
# What `ts`, docker and the like put before every line; DeepSpeed's own times are gone from most lines since 0.18.
_LEAD = re.compile(rf"{_TIME}(?:(Z)|([+-]\d\d):?([0-5]\d))?[ \t]")
_EPOCH = datetime.datetime(1970, 1, 1)
# The same moment once in the log's time and once as Unix nanoseconds: some jobs print both.
_UNIX = re.compile(r"<<<\w{1,64}(?::\w{1,64})?[,:](\d{19})>>>")
_QUARTER_NS = 900_000_000_000
# Quarters of an hour that clocks are ahead of UTC somewhere: whole hours, and the zones that lie between them.
_ZONES = (*range(-48, 57, 4), -38, -14, -10, 14, 18, 22, 23, 26, 35, 38, 42, 51, 55)


@dataclass(frozen=True)
class Line:
    """A line without its colours and the time before it. t_ns: its time as if the log's clock were UTC; unix_ns: in
    Unix time. None where it does not tell."""

    text: str
    t_ns: int | None
    unix_ns: int | None = None


def read_lines(source: Source) -> Iterator[Line]:
    with source.text() as file:
        while piece := file.readline(_LONGEST):
            text = piece.rstrip("\n")
            yield _line(_COLOR.sub("", text) if "\x1b" in text else text)


def _line(text: str) -> Line:
    lead = _LEAD.match(text)
    if lead is None:
        stamp = _STAMP.search(text) if "[20" in text else None
        return Line(text, None if stamp is None else _stamp(stamp))
    t_ns = _stamp(lead)
    utc, hours, minutes = lead.groups()[7:]
    ahead = 0 if utc else None if hours is None else int(hours) * 4 + int(hours[0] + minutes) // 15
    text = text[lead.end() :]
    return Line(text, t_ns, None if t_ns is None or ahead is None else t_ns - ahead * _QUARTER_NS)


def _stamp(match: re.Match[str]) -> int | None:
    *parts, fraction = match.groups()[:7]
    try:
        seconds = (datetime.datetime(*map(int, parts)) - _EPOCH).total_seconds()  # type: ignore[arg-type]
    except ValueError:
        return None
    return int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))


def zone_ns(lines: Iterable[Line]) -> int | None:
    """What the log's clock is ahead of UTC, from a line that tells both times; None where none does."""
    for line in lines:
        match = _UNIX.search(line.text) if "<<<" in line.text else None
        unix_ns = int(match.group(1)) if match else line.unix_ns
        if unix_ns is not None and line.t_ns is not None:
            quarters = round((line.t_ns - unix_ns) / _QUARTER_NS)
            if min(_ZONES) <= quarters <= max(_ZONES):
                return quarters * _QUARTER_NS
    return None


def zone_by_overlap(span: tuple[int, int], reference: tuple[int, int]) -> tuple[int, bool] | None:
    """(offset ns, whether it is the only one) that puts `span`, of a clock in an unknown zone, inside `reference`.

    None where no zone of the world makes the two meet.
    """
    shares = {quarter: overlap(span, reference, quarter * _QUARTER_NS) for quarter in _ZONES}
    best = max(shares.values())
    if best <= 0:
        return None
    fitting = [quarter for quarter in _ZONES if shares[quarter] > best - 0.05]
    # UTC is what most machines of this kind run on.
    return min(fitting, key=abs) * _QUARTER_NS, len(fitting) == 1


def overlap(span: tuple[int, int], reference: tuple[int, int], ahead_ns: int) -> float:
    """The share of `span`, of a clock that is so much ahead of UTC, that `reference` covers; 0 or less: none of it."""
    start, end = span[0] - ahead_ns, span[1] - ahead_ns
    return (min(end, reference[1]) - max(start, reference[0])) / max(end - start, 1)
