"""Reads the times of the rows of a monitor file, in any of the formats in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

# Unix time in s, ms, us or ns: number of digits before the point (from 2001 to 2286) -> power of ten to ns.
_POWERS = {10: 9, 13: 6, 16: 3, 19: 0}
_HALF_DAY_NS = 43_200_000_000_000
_MAX_NS = 1 << 62
_FIRST, _LAST = pd.Timestamp("1990-01-01", tz="UTC"), pd.Timestamp("2100-01-01", tz="UTC")


@dataclass(frozen=True)
class RowTimes:
    """Times of the rows of a monitor file.

    Attributes:
        ns: Int64; `<NA>` for a row without a valid time.
        dated: Whether they are Unix times.
        note: Assumption that was made about them, to follow the name of the file; None if none was made.
    """

    ns: pd.Series[Any]
    dated: bool
    note: str | None = None


def read_times(stamps: pd.Series[str], device: pd.Series[float]) -> RowTimes:
    """Parse times in the format that most of them have.

    Args:
        stamps: Times as they are in the file.
        device: Number of the device of each row.
    """
    unix = stamps.str.extract(r"^(\d{10,19})(?:\.(\d{1,9})\d*)?$")
    is_time_of_day = stamps.str.fullmatch(r"\d{1,2}:\d\d:\d\d(?:\.\d{1,9})?")
    unix_share, day_share = unix[0].notna().mean(), is_time_of_day.mean()
    if max(unix_share, day_share) <= 0.5:
        return _read_dates(stamps)
    return _read_unix(unix) if unix_share >= day_share else _read_times_of_day(stamps.where(is_time_of_day), device)


def assume_times(device: pd.Series[float], hint: str) -> RowTimes:
    """Return times for a file without times: the rows of each device are 1 s apart.

    Args:
        device: Number of the device of each row.
        hint: The way to get times into such a file.
    """
    ns = device.groupby(device).cumcount() * 1_000_000_000
    note = f"has no times ({hint}): its samples are assumed to be 1 s apart"
    return RowTimes(ns.astype("Int64"), False, note)


def _read_unix(parts: pd.DataFrame) -> RowTimes:
    digits = parts[0].str.len()
    # A line that was cut in its time has fewer digits than the others.
    power = _POWERS.get(int(digits.mode()[0]))
    ns = pd.Series(pd.NA, parts.index, dtype="Int64")
    if power is not None:
        complete = parts[digits == digits.mode()[0]]
        values = [
            int(whole) * 10**power + _fraction_ns(fraction, power)
            for whole, fraction in zip(complete[0], complete[1], strict=True)
        ]
        ns[complete.index] = pd.array([value if value < _MAX_NS else None for value in values], dtype="Int64")
    return RowTimes(ns, True)


def _fraction_ns(digits: Any, power: int) -> int:
    return int(digits.ljust(9, "0")[:power] or 0) if isinstance(digits, str) else 0


def _read_times_of_day(stamps: pd.Series[str], device: pd.Series[float]) -> RowTimes:
    time = pd.to_timedelta(stamps, errors="coerce")
    ns = pd.Series(pd.NA, stamps.index, dtype="Int64")
    valid = time.notna()
    ns[valid] = time[valid].dt.as_unit("ns").astype("int64")
    # The time of day falls back at midnight. The rows of one device may follow those of another.
    days = ns[valid].groupby(device[valid]).diff().lt(-_HALF_DAY_NS).fillna(False).groupby(device[valid]).cumsum()
    ns[valid] += days * 2 * _HALF_DAY_NS
    return RowTimes(ns, False, "has times of day without dates (dmon -o DT writes both)")


def _read_dates(stamps: pd.Series[str]) -> RowTimes:
    stamps = stamps.str.replace(r"^(\d{4})[/-]?(\d\d)[/-]?(\d\d)[ T]", r"\1-\2-\3 ", regex=True)
    parsed = pd.to_datetime(stamps, errors="coerce", format="ISO8601", utc=True)
    valid = parsed.between(_FIRST, _LAST)
    ns = pd.Series(pd.NA, stamps.index, dtype="Int64")
    ns[valid] = parsed[valid].dt.as_unit("ns").astype("int64")
    zoned = stamps[valid].str.contains(r"(?:Z|[+-]\d\d:?\d\d)$").any()
    return RowTimes(ns, True, None if zoned else "has local times without a time zone: they are read as UTC")
