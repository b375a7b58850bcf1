"""Finds the times that a user's script wrote before the lines of a tool that writes none."""

from __future__ import annotations

import datetime
import re

_ISO = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_UNIX = r"\d{10}(?:\.\d{1,9})?|\d{13}|\d{16}|\d{19}"
_TIME_OF_DAY = r"\d\d:\d\d:\d\d(?:\.\d{1,9})?"
# Output of `date` in the C locale and in English: `Sun Nov 22 10:00:00 UTC 2026`, `... 10:00:00 AM UTC 2026`.
_DATE = re.compile(
    r"[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d:\d\d:\d\d)( [AP]M)? ([A-Z]{2,5}|[+-]\d\d) (\d{4})"
)
# The default of `ts` has month and day without a year, so its time of day is all that can be used.
_PREFIX = re.compile(rf"\[?(?:[A-Z][a-z]{{2}} [ \d]\d )?({_ISO}|{_UNIX}|{_TIME_OF_DAY})\]?:?")


def read_time(text: str) -> str | None:
    """Return the time that a text consists of, in a form that `read_times` reads.

    Args:
        text: A line, or the part of a line before the output of a tool. `#` and the words date and time may precede.

    Returns:
        A Unix time, a date with a time, or a time of day; None if the text is something else.
    """
    text = re.sub(r"^[#\s]*(?:(?:date|time|timestamp)\s*[:=]\s*)?", "", text.strip(), count=1, flags=re.IGNORECASE)
    if match := _PREFIX.fullmatch(text):
        return match.group(1).replace("/", "-").replace(",", ".").replace(" UTC", "Z").replace("UTC", "Z")
    if match := _DATE.fullmatch(text):
        month, day, time, half, zone, year = match.groups()
        try:
            form = "%Y %b %d %I:%M:%S %p" if half else "%Y %b %d %H:%M:%S"
            parsed = datetime.datetime.strptime(f"{year} {month} {day} {time}{half or ''}", form)
        except ValueError:
            return None
        return parsed.isoformat() + ("Z" if zone in ("UTC", "GMT") else "")
    return None
