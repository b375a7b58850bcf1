"""Logs of Megatron-LM: iterations, timers in each of their forms, memory, times, and
logs that were cut off."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.importers.load import import_trace, recognize
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import Trace
from tests.conftest import slow_case

MS = 10**6
SECOND = 10**9
SETUP = [
    "using world size: 2, data-parallel size: 1, tensor-model-parallel size: 2, "
    "pipeline-model-parallel size: 1",
    " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1000",
    " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 1001",
]
REPORTS = [
    f"[Rank {rank}] (after 10 iterations) memory (MB) | allocated: 9334.3779296875 | "
    f"max allocated: {10606 + rank}.5 | "
    f"reserved: 10998.00 | max reserved: {10998 + rank}.00"
    for rank in (0, 1)
]
TIMERS = {
    "forward-backward": 400.0,
    "forward-compute": 150.0,
    "backward-compute": 230.0,
    "optimizer-clip-main-grad": 10.0,
    "optimizer-inner-step": 40.0,
    "optimizer": 60.0,
}


def iteration_line(number: int, ms: float = 512.3, stamp: str = "") -> str:
    return (
        f" {stamp}iteration {number:8d}/{100:8d} | consumed samples: "
        f"{number * 768:12d} | elapsed time per iteration "
        f"(ms): {ms:.1f} | learning rate: 1.365E-05 | global batch size:   768 | lm "
        "loss: 2.382640E+00 | "
        "loss scale: 1.0 | grad norm: 0.227 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


def minmax(timers: dict[str, float]) -> list[str]:
    rows = [
        f"    {(name + ' ').ljust(48, '.')}: ({ms - 5:.2f}, {ms:.2f})"
        for name, ms in timers.items()
    ]
    return ["(min, max) time across ranks (ms):", *rows]


def maximum(timers: dict[str, float]) -> list[str]:
    return [
        "max time across ranks (ms):",
        *(f"    {(n + ' ').ljust(48, '.')}: {ms:.2f}" for n, ms in timers.items()),
    ]


def by_rank(timers: dict[str, float]) -> list[str]:
    lines = ["times across ranks (ms):"]
    for name, ms in timers.items():
        lines += [
            f"  {name}:",
            f"     rank  0: {ms:.2f}",
            f"     rank  1: {ms / 2:.2f}",
        ]
    return lines


def one_line(timers: dict[str, float]) -> list[str]:
    return [
        "time (ms) | " + " | ".join(f"{name}: {ms:.2f}" for name, ms in timers.items())
    ]


def import_log(tmp_path: Path, lines: Iterable[str], end: str = "\n") -> Trace:
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines) + end)
    assert recognize(Source(file)) == "megatron-log"
    return import_trace([file], tmp_path / "run.ebb", force=True)


def phase_rows(trace: Trace, rank: int = 0) -> list[tuple[int, str, float, float]]:
    """Return (iteration, phase, start and end in ms)."""
    rows = trace.phases(rank)
    starts, ends = rows["start_ns"] / MS, rows["end_ns"] / MS
    return list(zip(rows["iteration"], rows["phase"], starts, ends, strict=True))


@pytest.mark.parametrize("form", [minmax, slow_case(maximum), one_line])
def test_import_log__places_phases_at_the_end_of_their_iterations(
    tmp_path: Path, form: object
) -> None:
    assert callable(form)
    lines = [
        line for number in (1, 2) for line in (iteration_line(number), *form(TIMERS))
    ]
    trace = import_log(tmp_path, [*SETUP, *lines])
    ends = [512.3, 1024.6]
    assert phase_rows(trace) == [
        (
            number,
            phase,
            pytest.approx(ends[number] + start),
            pytest.approx(ends[number] + end),
        )
        for number in (0, 1)
        for phase, start, end in (
            ("forward", -460, -310),
            ("backward", -310, -80),
            ("update", -60, 0),
        )
    ]
    parts = trace.ops(0)
    assert (
        parts["name"].tolist()
        == ["optimizer-clip-main-grad", "optimizer-inner-step"] * 2
    )
    assert ((parts["end_ns"] - parts["start_ns"]) / MS).tolist() == [10, 40] * 2
    assert trace.meta.clock.name == "unknown"
    summary = summarize(trace)
    assert (summary.iterations, summary.iteration_ms) == (2, pytest.approx(512.3))
    assert trace.rank(0).world_size == 2
    assert trace.rank(0).model.total_params == 2001
    assert any("placed one after another" in note for note in trace.notes)


def test_import_log__reads_timers_of_each_rank(tmp_path: Path) -> None:
    trace = import_log(tmp_path, [*SETUP, iteration_line(1), *by_rank(TIMERS)])
    lengths = {
        rank: [
            (phase, round(end - start, 6))
            for _, phase, start, end in phase_rows(trace, rank)
        ]
        for rank in (0, 1)
    }
    assert lengths == {
        0: [("forward", 150.0), ("backward", 230.0), ("update", 60.0)],
        1: [("forward", 75.0), ("backward", 115.0), ("update", 30.0)],
    }


def test_import_log__iterations_of_a_line_get_their_mean(tmp_path: Path) -> None:
    lines = [
        line
        for number in (30, 40, 50)
        for line in (iteration_line(number, 100 + number), *minmax({}))
    ]
    trace = import_log(tmp_path, lines)
    marks = trace.iteration_marks(0)
    assert marks["iteration"].tolist() == list(range(30))
    lengths = ((marks["end_ns"] - marks["start_ns"]) / MS).tolist()
    assert lengths == [130.0] * 10 + [140.0] * 10 + [150.0] * 10
    assert "iteration 0 of the trace is iteration 21 of the log" in trace.notes
    assert any(
        "a line per 10 iterations: each of them gets their mean" in note
        for note in trace.notes
    )
    assert any(
        "its iterations take 140.0 ms (median). For phases run with" in note
        for note in trace.notes
    )
    (only,) = {
        len(
            import_log(
                tmp_path, [f"  log_interval {'.' * 30} 5", iteration_line(5)]
            ).iteration_marks(0)
        )
    }
    assert only == 5


def test_import_log__does_not_call_forward_backward_other(tmp_path: Path) -> None:
    timers = {"forward-backward": 400.0, "optimizer": 60.0}
    trace = import_log(
        tmp_path,
        [line for n in (1, 2) for line in (iteration_line(n), *minmax(timers))],
    )
    assert [phase for _, phase, _, _ in phase_rows(trace)] == ["update", "update"]
    ops = trace.ops(0)
    assert set(ops["name"]) == {"forward-backward"}
    assert ((ops["end_ns"] - ops["start_ns"]) / MS).tolist() == [400.0, 400.0]
    by_phase = {phase.phase: phase.median_ms for phase in summarize(trace).phases}
    assert by_phase["forward"] is by_phase["backward"] is None
    assert any("does not tell forward from backward" in note for note in trace.notes)
    # Most of the time outside the recorded phases is forward and backward: no rule may
    # blame data loading.
    assert not [
        finding for finding in find(trace).findings if finding.rule == "between-phases"
    ]


def test_import_log__timers_never_exceed_their_iteration(tmp_path: Path) -> None:
    timers = {"forward-compute": 300.0, "backward-compute": 600.0, "optimizer": 100.0}
    trace = import_log(tmp_path, [iteration_line(1, 500), *minmax(timers)])
    assert [(phase, end - start) for _, phase, start, end in phase_rows(trace)] == [
        ("forward", 150.0), ("backward", 300.0), ("update", 50.0)
    ]  # fmt: skip
    assert any("shortened in proportion" in note for note in trace.notes)


def test_import_log__reads_the_memory_of_each_rank(tmp_path: Path) -> None:
    trace = import_log(
        tmp_path, [*SETUP, iteration_line(10), "".join(REPORTS), iteration_line(20)]
    )
    for rank in (0, 1):
        memory = trace.memory(rank)
        # Its MB are MiB.
        assert dict(zip(memory["pool"], memory["bytes"], strict=True)) == {
            "allocated": round((10606.5 + rank) * 2**20),
            "reserved": (10998 + rank) * 2**20,
        }
        assert set(memory["device"]) == {f"cuda:{rank}"}


@pytest.mark.parametrize(
    "stamps",
    [
        [f"[2026-11-22 10:00:0{second}] " for second in (1, 2, 5)],
        [f"[2026-11-22 10:00:0{second}.000000] " for second in (1, 2, 5)],
    ],
)
def test_place_iterations__end_at_their_lines_and_do_not_overlap(
    tmp_path: Path, stamps: list[str]
) -> None:
    lines = [
        iteration_line(number, 1200.0, stamp) for number, stamp in enumerate(stamps, 1)
    ]
    trace = import_log(tmp_path, lines)
    marks = trace.iteration_marks(0)
    start = 1_795_341_600 * SECOND
    # The second line is 1 s after the first by full seconds, but its iteration takes
    # 1.2 s.
    assert ((marks["end_ns"] - start) / SECOND).tolist() == [1.0, 2.2, 5.0]
    assert ((marks["end_ns"] - marks["start_ns"]) / SECOND).tolist() == [1.2] * 3
    assert trace.meta.clock.name == "unix"


def test_import_log__combines_with_a_monitor_file(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "\n".join(
            line
            for n in (1, 2)
            for line in (
                iteration_line(n, 900.0, f"[2026-11-22 10:00:0{n}] "),
                *minmax(TIMERS),
            )
        )
        + "\n"
    )
    rows = "".join(f"2026-11-22T10:00:0{n}Z,0,{1000 + n} MiB\n" for n in range(4))
    (tmp_path / "m.csv").write_text("timestamp,index,memory.used [MiB]\n" + rows)
    trace = import_trace(
        [tmp_path / "train.log", tmp_path / "m.csv"], tmp_path / "run.ebb"
    )
    assert {phase.phase: phase.peak_bytes for phase in summarize(trace).phases}[
        "update"
    ] == round(1001.5 * 2**20)


def test_is_iteration__reads_the_lines_of_forks(tmp_path: Path) -> None:
    line = (
        "[2024-09-16 22:59:19.287338][INFO] iteration=       1/  635782 | "
        "consumed_samples=   768 | "
        "consumed_tokens=     3145728 | elapsed_time_per_iteration_ms=29570.0 | "
        "learning_rate=9.4372e-09 |"
    )
    trace = import_log(
        tmp_path, [line, *minmax({"forward-backward": 26095.09, "optimizer": 3409.92})]
    )
    assert [
        (phase, round(end - start, 2)) for _, phase, start, end in phase_rows(trace)
    ] == [("update", 3409.92)]


def test_matches__leaves_logs_with_timers_of_deepspeed_to_their_importer(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train.log"
    for line in (
        "[2024-04-15 10:00:00,000] [INFO] [Rank 0] time (ms) | fwd: 1.00 | bwd: 2.00 "
        "| step: 3.00",
        "Engine before forward\n"
        "MA 1.0 GB         Max_MA 1.5 GB         CA 2.0 GB         Max_CA 3 GB ",
    ):
        file.write_text(f"{iteration_line(1)}\n{line}\n")
        assert recognize(Source(file)) == "deepspeed-log"


@pytest.mark.parametrize(
    "length", [20, 500, 1100, *map(slow_case, range(140, 1500, 120))]
)
def test_import_log__reads_any_beginning_of_a_log(tmp_path: Path, length: int) -> None:
    """A log that was cut off anywhere gives its complete iterations, with the same
    phases, or an error."""
    lines = [
        line for number in (1, 2) for line in (iteration_line(number), *minmax(TIMERS))
    ]
    text = "\n".join(lines) + "\n"
    file = tmp_path / "train.log"
    file.write_text(text[:length])
    if length < 120:
        with pytest.raises(SourceError, match="has no line `iteration N/ M"):
            import_trace([file], tmp_path / "run.ebb", format="megatron-log")
        return
    trace = import_trace([file], tmp_path / "run.ebb", format="megatron-log")
    lengths = [
        (phase, round(end - start, 6)) for _, phase, start, end in phase_rows(trace)
    ]
    whole = [("forward", 150.0), ("backward", 230.0), ("update", 60.0)]
    if length > len("\n".join(lines[: len(lines) // 2])):
        assert lengths in (whole, whole * 2)
    assert all(row in whole for row in lengths)
