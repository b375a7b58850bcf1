"""The times of a monitor file's rows, in whatever way they were written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

# Unix time in s, ms, us or ns, by how many digits stand before the point (from 2001 to 2286): the power of ten to ns.
_POWERS = {10: 9, 13: 6, 16: 3, 19: 0}
_HALF_DAY_NS = 43_200_000_000_000
_FIRST, _LAST = pd.Timestamp("1990-01-01", tz="UTC"), pd.Timestamp("2100-01-01", tz="UTC")


@dataclass(frozen=True)
class Times:
    """ns: Int64, `<NA>` where a row has none. dated: whether they are Unix times. note: what to say about them."""

    ns: pd.Series[Any]
    dated: bool
    note: str | None = None


def read_times(stamps: pd.Series[str], device: pd.Series[float]) -> Times:
    """stamps: as they are in the file; what most of them are tells how to read them."""
    unix = stamps.str.extract(r"^(\d{10,19})(?:\.(\d{1,9})\d*)?$")
    day = stamps.str.fullmatch(r"\d{1,2}:\d\d:\d\d(?:\.\d{1,9})?")
    unix_share, day_share = unix[0].notna().mean(), day.mean()
    if max(unix_share, day_share) <= 0.5:
        return _dates(stamps)
    return _unix(unix) if unix_share >= day_share else _of_day(stamps.where(day), device)


def apart(device: pd.Series[float]) -> Times:
    """Of a file without times: as many seconds as there are rows of the same device before."""
    ns = device.groupby(device).cumcount() * 1_000_000_000
    return Times(ns.astype("Int64"), False, "has no times (dmon -o DT writes them): its samples are taken as 1 s apart")


def _unix(parts: pd.DataFrame) -> Times:
    digits = parts[0].str.len()
    # A line that was cut in its time has fewer digits than the others.
    power = _POWERS.get(int(digits.mode()[0]))
    ns = pd.Series(pd.NA, parts.index, dtype="Int64")
    if power is not None:
        known = parts[digits == digits.mode()[0]]
        values = [
            int(whole) * 10**power + _fraction(rest, power) for whole, rest in zip(known[0], known[1], strict=True)
        ]
        ns[known.index] = pd.array([value if value < 1 << 62 else None for value in values], dtype="Int64")
    return Times(ns, True)


def _fraction(digits: Any, power: int) -> int:
    return int(digits.ljust(9, "0")[:power] or 0) if isinstance(digits, str) else 0


def _of_day(stamps: pd.Series[str], device: pd.Series[float]) -> Times:
    time = pd.to_timedelta(stamps, errors="coerce")
    ns = pd.Series(pd.NA, stamps.index, dtype="Int64")
    known = time.notna()
    ns[known] = time[known].dt.as_unit("ns").astype("int64")
    # Past midnight the time of day falls back; devices may stand one below the other.
    days = ns[known].groupby(device[known]).diff().lt(-_HALF_DAY_NS).fillna(False).groupby(device[known]).cumsum()
    ns[known] += days * 2 * _HALF_DAY_NS
    return Times(ns, False, "tells the time of day without the date (dmon -o DT writes both)")


def _dates(stamps: pd.Series[str]) -> Times:
    stamps = stamps.str.replace(r"^(\d{4})[/-]?(\d\d)[/-]?(\d\d)[ T]", r"\1-\2-\3 ", regex=True)
    parsed = pd.to_datetime(stamps, errors="coerce", format="ISO8601", utc=True)
    known = parsed.between(_FIRST, _LAST)
    ns = pd.Series(pd.NA, stamps.index, dtype="Int64")
    ns[known] = parsed[known].dt.as_unit("ns").astype("int64")
    zoned = stamps[known].str.contains(r"(?:Z|[+-]\d\d:?\d\d)$").any()
    return Times(ns, True, None if zoned else "tells local times without their zone: they are taken as UTC")
