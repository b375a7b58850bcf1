"""DeepSpeed logs made line by line, in the formats that DeepSpeed has had."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebbtide.features.importers.load import import_trace
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace

DATA = Path(__file__).parents[2] / "importers" / "data"
MS = 10**6
GIB = 2**30


def stamp_ns(text: str) -> int:
    """Return the first time in brackets, as if it were UTC."""
    match = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]", text)
    assert match
    moment = datetime.datetime.fromisoformat(f"{match[1]}+00:00")
    return int(moment.timestamp()) * 10**9 + int(match[2]) * MS


def log_line(
    second: float, text: str, kind: str = "INFO", where: str = "logging.py:96:log_dist"
) -> str:
    """Return a line of a log with its time."""
    moment = datetime.datetime(2024, 4, 15, 10) + datetime.timedelta(seconds=second)
    return (
        f"[{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}] [{kind}] "
        f"[{where}] {text}"
    )


def timer_text(**ms: float) -> str:
    """Return durations in ms as DeepSpeed prints them."""
    return "time (ms) | " + " | ".join(
        f"{name}: {value:.2f}" for name, value in ms.items()
    )


def iteration_lines(
    second: float, fwd: float = 100, bwd: float = 200, step: float = 50
) -> list[str]:
    """Return the lines of one iteration, whose timers are printed at `second`."""
    backward_parts = {"bwd_inner": bwd - 20, "bwd_allreduce": 15}
    all_timers = {"fwd": fwd, "bwd": bwd, **backward_parts, "step": step}
    micro_step_timers = {f"{name}_microstep": ms for name, ms in all_timers.items()}
    return [
        log_line(second, f"[Rank 0] {timer_text(optimizer_step=step - 10)}"),
        log_line(second, f"[Rank 0] {timer_text(**micro_step_timers)}"),
        log_line(second, f"[Rank 0] {timer_text(**all_timers)}"),
    ]


def mark_lines(
    second: float, word: str, ma: float = 1.0, peak: float = 1.5, where: str = "before"
) -> list[str]:
    """Return the lines of a memory mark, sizes in GiB."""
    return [
        log_line(
            second, f"Engine {where} {word}", where="utils.py:800:see_memory_usage"
        ),
        log_line(
            second,
            f"MA {ma} GB         Max_MA {peak} GB         CA 2.0 GB         Max_CA 3 "
            "GB ",
        ),
        log_line(second, "CPU Virtual Memory:  used = 10.0 GB, percent = 5.0%"),
    ]


def step_lines(count: int = 5, **durations: float) -> list[str]:
    """Return the lines of iterations whose timers are printed at 1 s, 2 s, and so
    on."""
    return [
        text
        for number in range(count)
        for text in iteration_lines(1.0 + number, **durations)
    ]


def micro_step_line(second: float, fwd: float, bwd: float, step: float = 0.05) -> str:
    """Return the timers of a micro-step, durations in ms."""
    return log_line(
        second,
        "[Rank 0] "
        f"{timer_text(fwd_microstep=fwd, bwd_microstep=bwd, step_microstep=step)}",
    )


CONFIG = """json = {
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1.000000e+08
    },
    "wall_clock_breakdown": true
}"""


def import_log(
    tmp_path: Path,
    lines: Iterable[str] | bytes,
    *other_files: Path,
    end: str = "\n",
    **options: Any,
) -> Trace:
    """Import a log, together with other files."""
    file = tmp_path / "run.log"
    file.write_bytes(
        lines if isinstance(lines, bytes) else (end.join(lines) + end).encode()
    )
    return import_trace(
        [file, *other_files], tmp_path / "run.ebb", force=True, **options
    )


def lengths_ms(trace: Trace) -> list[tuple[int, int, str, float]]:
    """Return (iteration, micro-step, phase, ms) of each phase of rank 0."""
    rows = trace.phases(0)
    ms = (rows["end_ns"] - rows["start_ns"]) / MS
    return [
        (int(i), int(m), p, d)
        for i, m, p, d in zip(
            rows["iteration"], rows["micro_step"], rows["phase"], ms, strict=True
        )
    ]


PLAIN = [
    (n, 0, phase, ms)
    for n in range(5)
    for phase, ms in zip(PHASES, (100.0, 200.0, 50.0), strict=True)
]


def write_monitor(
    path: Path,
    start_ns: int,
    seconds: float,
    step: float = 0.1,
    devices: Iterable[int] = (0, 1),
) -> Path:
    """Write a monitor file with a sample of each device every `step` seconds."""
    rows = [
        f"{device},{start_ns + int(n * step * 1e9)},{1000 + n},{8000 - n},1.5,2.5"
        for n in range(int(seconds / step))
        for device in devices
    ]
    path.write_text(
        "index,timestamp,memory.used [MiB],memory.free [MiB],rxpci,txpci\n"
        + "\n".join(rows)
        + "\n"
    )
    return path
