"""Reads the lines of a training log with their times, and the time zone of its
clock."""

import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder

# Number of lines that are searched for the lines of a framework.
_MAX_SEARCHED_LINES = 100_000
# Longer lines are not log lines. They are split, so that no file fills the memory.
_MAX_LINE_CHARS = 1 << 16
_TIME = r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)"
_FRACTION = r"[.,](\d{1,9})"
# Launchers put the host's name before the time, and ranks may break into each other's
# lines: it may be anywhere.
_STAMP = re.compile(rf"\[{_TIME}(?:{_FRACTION})?\]")
# The time that `ts`, docker and similar tools put before every line. Since 0.18 most
# lines of DeepSpeed have no time.
_LEAD = re.compile(rf"{_TIME}{_FRACTION}(?:(Z)|([+-]\d\d):?([0-5]\d))?[ \t]")
# Labels of ranks before lines: of torch's logs, of torchrun --tee, srun --label and
# mpirun --tag-output.
_RANK_LABEL = re.compile(
    r"\[(?:rank|default)(\d{1,7})\]:\s?|\s{0,6}(\d{1,7}): |"
    r"\[\d{1,9},(\d{1,7})\]<std\w{3}>:\s?"
)
_EPOCH = datetime.datetime(1970, 1, 1)
# Unix nanoseconds inside a line that also has the log's time: some jobs print both.
_UNIX = re.compile(r"<<<\w{1,64}(?::\w{1,64})?[,:](\d{19})>>>")
_QUARTER_NS = 900_000_000_000
# The offsets from UTC of time zones, in quarters of an hour.
_MIN_QUARTERS, _MAX_QUARTERS = -48, 56


@dataclass(frozen=True)
class LogLine:
    """Reads the lines of a training log with their times, and its clock's time zone."""

    text: str
    # Its time as if the log's clock were UTC; None if the line has no time
    t_ns: int | None
    # Its Unix time; None if the line does not state a time zone
    unix_ns: int | None = None
    # The rank that a launcher or the job has put before the line; None if none did
    rank: int | None = None


def read_lines(source: Source) -> Iterator[LogLine]:
    with source.text() as file:
        while raw_line := file.readline(_MAX_LINE_CHARS):
            text = raw_line.rstrip("\n")
            yield _parse_line(text)


def first_log_lines(source: Source) -> Iterator[str]:
    """Return the texts of the first lines; none of a file that is not text."""
    return (
        iter(())
        if not source.is_text
        else (line.text for line in islice(read_lines(source), _MAX_SEARCHED_LINES))
    )


def only_log(sources: Sequence[Source], name: str) -> Source:
    """Return the one log of an import. Raises SourceError for several."""
    if len(sources) > 1:
        raise SourceError(
            f"two {name} logs cannot make one trace: import each of them alone, then "
            "`ebbtide import` the traces"
        )
    return sources[0]


def _parse_line(text: str) -> LogLine:
    label = _RANK_LABEL.match(text)
    lead = _LEAD.match(text, label.end() if label else 0)
    if lead and not label:
        label = _RANK_LABEL.match(text, lead.end())
    rank = int(next(filter(None, label.groups()))) if label else None
    if lead is None:
        stamp = _STAMP.search(text) if "[20" in text else None
        return LogLine(text, None if stamp is None else _stamp_ns(stamp), rank=rank)
    t_ns = _stamp_ns(lead)
    utc, hours, minutes = lead.groups()[7:]
    quarters = (
        0
        if utc
        else None
        if hours is None
        else int(hours) * 4 + int(hours[0] + minutes) // 15
    )
    text = text[: lead.start()] + text[lead.end() :]
    return LogLine(
        text,
        t_ns,
        None if t_ns is None or quarters is None else t_ns - quarters * _QUARTER_NS,
        rank,
    )


def _stamp_ns(match: re.Match[str]) -> int | None:
    *parts, fraction = match.groups()[:7]
    try:
        seconds = (datetime.datetime(*map(int, parts)) - _EPOCH).total_seconds()  # type: ignore[arg-type]
    except ValueError:
        return None
    return int(seconds) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def zone_ns(line: LogLine) -> int | None:
    """Return the offset of the log's clock from UTC in ns.

    Return None for a line that does not have both times.
    """
    match = _UNIX.search(line.text) if "<<<" in line.text else None
    unix_ns = int(match.group(1)) if match else line.unix_ns
    if unix_ns is None or line.t_ns is None:
        return None
    quarters = round((line.t_ns - unix_ns) / _QUARTER_NS)
    return (
        quarters * _QUARTER_NS if _MIN_QUARTERS <= quarters <= _MAX_QUARTERS else None
    )


def clock_offset_ns(builder: TraceBuilder, zone: int | None) -> int:
    """Return how far the log's clock is ahead of UTC by the stated `zone`; 0, with a
    note, for None."""
    if zone is None:
        builder.note(
            "the log has local times without a time zone: they are read as UTC"
        )
    return zone or 0
