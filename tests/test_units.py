"""Quantities as text."""

from __future__ import annotations

from ebbtide.units import count_text, ms_text, rate_text


def test_count_text__has_three_digits_of_the_nearest_unit() -> None:
    assert [count_text(count) for count in (999.4, 999.6, 125e6, 999_885_952, 3.83e9, None)] == [
        "999", "1 k", "125 M", "1 G", "3.83 G", "-",
    ]  # fmt: skip


def test_rate_text__has_three_digits_of_the_nearest_unit() -> None:
    assert [rate_text(rate) for rate in (12.34e9, 999.8e6, 999.4e6)] == [
        "12.3 GB/s",
        "1 GB/s",
        "999 MB/s",
    ]


def test_ms_text__has_days_where_nobody_reads_milliseconds() -> None:
    assert [ms_text(time) for time in (9.994, 12.34, 999_999_999, 33_533_781_702)] == [
        "9.99 ms", "12.3 ms", "999,999,999 ms", "388 days",
    ]  # fmt: skip
