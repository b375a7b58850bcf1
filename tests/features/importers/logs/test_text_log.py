"""Lines of a log, their times, and the time zone of its clock."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest

from ebbtide.features.importers.logs.text_log import LogLine, read_lines, zone_ns
from ebbtide.features.importers.source import Source

HOUR = 3_600_000_000_000


def lines(tmp_path: Path, text: str | bytes) -> list[LogLine]:
    file = tmp_path / "x.log"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_lines(Source(file)))


def ns(*parts: int, fraction: int = 0) -> int:
    return (
        int(datetime.datetime(*parts, tzinfo=datetime.UTC).timestamp()) * 10**9
        + fraction
    )  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("text", "expected", "t_ns"),
    [
        (
            "[2024-04-15 00:52:42,648] [INFO] x",
            "[2024-04-15 00:52:42,648] [INFO] x",
            42_648_000_000,
        ),
        (
            "host-1: [2024-04-15 00:52:42,648] x",
            "host-1: [2024-04-15 00:52:42,648] x",
            42_648_000_000,
        ),
        ("2024-04-15T00:52:42.648123 x", "x", 42_648_123_000),
        ("2024-04-15 00:52:42.648     x", "    x", 42_648_000_000),
        ("2024-04-15 00:52:42,648123456Z\tx", "x", 42_648_123_456),
        (
            "2024-04-15T00:52:42.648+02:00 [2024-04-15 00:00:00,000] x",
            "[2024-04-15 00:00:00,000] x",
            42_648_000_000,
        ),
        ("[2024-04-15 00:52:42] x", "[2024-04-15 00:52:42] x", 42_000_000_000),
        ("[2024-13-45 99:52:42,648] x", "[2024-13-45 99:52:42,648] x", None),
        ("[1024-04-15 00:52:42,648] x", "[1024-04-15 00:52:42,648] x", None),
        ("no time", "no time", None),
        ("", "", None),
    ],
)
def test_read_lines__splits_off_the_time(
    tmp_path: Path, text: str, expected: str, t_ns: int | None
) -> None:
    (line,) = lines(tmp_path, f"{text}\n")
    start = ns(2024, 4, 15, 0, 52)
    assert (line.text, line.t_ns) == (expected, None if t_ns is None else start + t_ns)


def test_read_lines__handles_colours_line_ends_and_invalid_bytes(
    tmp_path: Path,
) -> None:
    text = b"\xef\xbb\xbf\x1b[92m[OKAY]\x1b[0m a\r\nb\rc\n\n\xff\xfe\x00z"
    assert [line.text for line in lines(tmp_path, text)] == [
        "[OKAY] a",
        "b",
        "c",
        "",
        "\ufffd\ufffdz",
    ]


def test_read_lines__splits_a_line_without_an_end(tmp_path: Path) -> None:
    assert [len(line.text) for line in lines(tmp_path, "x" * 200_000)] == [
        65536,
        65536,
        65536,
        3392,
    ]


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("[2024-04-15 00:52:42,648] [INFO] <<<TIMER:step_start,{}>>>", 0.0),
        ("[2024-04-15 06:22:42,600] <<<step,{}>>>", 5.5),
        ("[2024-04-14 12:52:42,648] <<<TIMER:a:{}>>>", -12.0),
        ("2024-04-15T02:52:42.648+02:00 x", 2.0),
        ("2024-04-14T21:22:42.648-0330 x", -3.5),
        ("2024-04-15T00:52:42.648Z x", 0.0),
        ("[2034-04-15 00:52:42,648] <<<TIMER:step_start,{}>>>", None),
        ("<<<TIMER:step_start,{}>>>", None),
        ("[2024-04-15 00:52:42,648] x", None),
    ],
)
def test_zone_ns__comes_from_a_line_with_both_times(
    tmp_path: Path, text: str, hours: float | None
) -> None:
    unix = ns(2024, 4, 15, 0, 52, 42, fraction=648_000_000)
    first, line = lines(tmp_path, "first\n" + text.format(unix) + "\n")
    assert zone_ns(first) is None
    assert zone_ns(line) == (None if hours is None else round(hours * HOUR))


HOSTILE = [
    "time (ms)| " + " " * 40_000,
    "time (ms) | " + "a" * 40_000,
    "time (ms) | a: 1.00 " * 3_000,
    "| a: 1 " * 8_000,
    "time (ms)" + " | a: 1" * 8_000,
    "MA 1 GB" + " " * 40_000 + "x",
    "MA 1 GB Max_MA 1 GB " * 2_000,
    "CPU Virtual Memory: " + " " * 40_000,
    "number of parameters on " * 2_000,
    "number of parameters on" + " (" * 20_000,
    "world_size " + "." * 40_000,
    "torch version " + "." * 40_000,
    "Setting " + "A" * 40_000 + "_VISIBLE_DEVICES=x",
    "Setting CUDA_VISIBLE_DEVICES=" + "1" * 40_000,
    "Setting CUDA_VISIBLE_DEVICES=" + "1," * 20_000,
    "num_elems = " + "1" * 40_000 + "." + "1" * 20_000,
    "<<<" + "a" * 40_000 + ",1>>>",
    "<<<a:" * 8_000,
    "\x1b[" + "0;" * 20_000,
    "\x1b[0" * 15_000,
    "[2024-04-15 " * 4_000,
    "[Rank 1] " + "=" * 40_000 + " Param",
    "[Rank 1] " * 5_000 + "time (ms)",
    "cmd = " + "'" * 40_000,
    "x[2024-" * 8_000 + "json = {",
    "json = {" * 5_000,
    "[2024-04-15 00:00:00,000] json = " + "{" * 40_000,
    "[2024-04-15 00:00:00,000] json = " + '{"a":' * 8_000,
    "[2024-04-15 00:00:00,000] json = {" + '"a": [' * 8_000 + "}",
    "[2024-04-15 00:00:00,000] json = {" + '"a": ' + "9" * 40_000 + "}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:24])
def test_readers__take_linear_time_for_any_line(tmp_path: Path, text: str) -> None:
    """A line four times as long must not take sixteen times as long; quadratic patterns
    took minutes."""
    from ebbtide.features.deepspeed.log_importer.durations import TimerReader
    from ebbtide.features.importers.logs.settings import SettingsReader

    def seconds(size: int) -> float:
        spent = []
        for _ in range(3):
            begin = time.process_time()
            timers, settings = TimerReader(), SettingsReader()
            for line in lines(tmp_path, text[:size] + "\n"):
                timers.feed(line)
                settings.feed(line)
                zone_ns(line)
            spent.append(time.process_time() - begin)
        return min(spent)

    assert seconds(len(text)) < 10 * seconds(len(text) // 4) + 0.02
