"""Logs of DeepSpeed: those that others published, those of today, and the other ways in which they were written."""

from __future__ import annotations

import csv
import datetime
import gzip
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.profiler.importers.deepspeed import importer as deepspeed_log
from ebbtide.profiler.importers.load import Hardware, import_trace
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import Trace

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "deep-optimizer-states"
LOGS = sorted(PUBLISHED.glob("*/*.log"))
WATCHED = [log for log in LOGS if log.with_name(f"{log.stem}-monitor.csv").exists()]
PHASES = ("forward", "backward", "update")
MS = 10**6
GIB = 2**30

published = pytest.mark.skipif(not LOGS, reason="the published measurements are not here (shared/published)")
each_log = pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem[4:])
each_watched = pytest.mark.parametrize("log", WATCHED, ids=lambda log: log.stem[4:])


def monitor_of(log: Path) -> Path:
    return log.with_name(f"{log.stem}-monitor.csv")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Trace]:
    return cached(tmp_path_factory.mktemp("alone"), lambda log: [log])


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Trace]:
    return cached(tmp_path_factory.mktemp("watched"), lambda log: [monitor_of(log), log])


def cached(folder: Path, files: Callable[[Path], list[Path]]) -> Callable[[Path], Trace]:
    traces: dict[Path, Trace] = {}

    def get(log: Path) -> Trace:
        if log not in traces:
            traces[log] = import_trace(files(log), folder / f"{len(traces)}.ebb", hardware=Hardware(link=(5, 16)))
        return traces[log]

    return get


def world_size(log: Path) -> int:
    """The number of ranks that a published log's name states."""
    named = re.search(r"-dp(\d+)-", log.name)
    assert named
    return int(named[1])


def told_ms(log: Path) -> list[dict[str, float]]:
    """What the lines of whole steps say, read without the importer."""
    line = re.compile(r"\| fwd: ([\d.]+) \| bwd: ([\d.]+) \|.*\| step: ([\d.]+)")
    found = [line.search(text) for text in log.read_text().splitlines()]
    return [dict(zip(PHASES, map(float, match.groups()), strict=True)) for match in found if match]


def stamp_ns(text: str) -> int:
    """The first time in brackets, as if it were UTC."""
    match = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]", text)
    assert match
    moment = datetime.datetime.fromisoformat(f"{match[1]}+00:00")
    return int(moment.timestamp()) * 10**9 + int(match[2]) * MS


def marks(log: Path, text: str) -> list[int]:
    return [stamp_ns(line) for line in log.read_text().splitlines() if text in line]


def unix(log: Path, name: str) -> list[int]:
    """Of the four ranks' marks of each step, in turns."""
    return [int(ns) for ns in re.findall(rf"<<<TIMER:{name},(\d+)>>>", log.read_text())]


@published
@each_log
def test_the_medians_are_those_of_the_lines(alone: Callable[[Path], Trace], log: Path) -> None:
    told, summary = told_ms(log), summarize(alone(log))
    # One of the runs ended before its first step.
    assert (summary.iterations, summary.warmup_iterations) == (len(told), 2 if told else 0)
    assert summary.ranks == world_size(log)
    for phase in summary.phases[:3]:
        expected = statistics.median(step[phase.phase] for step in told[2:]) if told else None
        assert phase.median_ms == pytest.approx(expected, abs=1e-6)
        assert phase.count == len(told)


@published
@each_log
def test_phases_lie_in_order_and_at_the_marks(alone: Callable[[Path], Trace], log: Path) -> None:
    phases = alone(log).phases(0)
    assert list(phases["phase"]) == list(PHASES) * len(told_ms(log))
    assert list(phases["iteration"]) == [n for n in range(len(told_ms(log))) for _ in PHASES]
    times = phases[["start_ns", "end_ns"]].to_numpy().ravel()
    assert (np.diff(times) >= 0).all()
    for phase, word in (("forward", "forward"), ("backward", "backward"), ("update", "step")):
        rows = phases[phases["phase"] == phase]
        # A log's clock has milliseconds, and its timers were read a little before they were printed.
        assert (rows["start_ns"].to_numpy() >= np.array(marks(log, f"Engine before {word}")) - 2 * MS).all()
        assert (rows["end_ns"].to_numpy() <= np.array(marks(log, f"Engine after {word}")) + 5 * MS).all()


@published
@each_watched
def test_updates_lie_where_the_jobs_own_unix_times_are(alone: Callable[[Path], Trace], log: Path) -> None:
    starts, ends = unix(log, "step_start"), unix(log, "step_end")
    phases = alone(log).phases(0)
    updates = phases[phases["phase"] == "update"]
    assert len(starts) == len(ends) == 4 * len(updates)
    for number, (start, end) in enumerate(zip(updates["start_ns"], updates["end_ns"], strict=True)):
        step = slice(4 * number, 4 * number + 4)
        assert abs(start - min(starts[step])) < 3 * MS
        assert abs(end - max(ends[step])) < 6 * MS
    assert alone(log).meta["clock"] == {"name": "unix", "host": None, "wall_offset_ns": 0}


@published
@each_log
def test_memory_is_that_of_the_marks(alone: Callable[[Path], Trace], log: Path) -> None:
    trace = alone(log)
    told = [float(gib) for gib in re.findall(r"\bMax_MA ([\d.]+) GB", log.read_text())]
    assert summarize(trace).memory.pools["allocated"] == round(max(told) * GIB)
    rows = trace.memory(0)
    used = [float(gib) for gib in re.findall(r"\bused = ([\d.]+) GB", log.read_text())]
    assert sorted(rows[rows["pool"] == "host"]["bytes"]) == sorted(round(gib * GIB) for gib in used)
    assert all(trace.memory(rank).empty for rank in range(1, world_size(log)))


@published
@each_log
def test_job_and_model_are_told(alone: Callable[[Path], Trace], log: Path) -> None:
    trace = alone(log)
    zero = trace.meta["deepspeed"]["config"]["zero_optimization"]
    named = re.search(r"-ratio([\d.]+)-subg(\d+)-prefetch(\d)-flush_async(\d)-opt_gaps(\d+)", log.name)
    assert named
    assert (zero["stage"], zero["sub_group_size"]) == (3, float(named[2]))
    assert zero["offload_optimizer"]["ratio"] == float(named[1])
    # The runs of one and two ranks have another model of the same name.
    ranks = world_size(log)
    total = {("20B", 4): 15_326_663_680, ("13B", 4): 11_315_860_480}.get((log.name[4:7], ranks), 11_197_895_680)
    for rank in range(ranks):
        entry = trace.rank(rank)
        assert entry["model"] == {"total_params": total, "params": total // ranks}
        assert (entry["world_size"], entry["devices"][0]["device"]) == (ranks, f"cuda:{rank}")
        assert entry["optimizers"] == [{"class": "DeepSpeedCPUAdam", "params": total // ranks}]
        assert entry["torch"]
    assert trace.ranks == list(range(ranks))
    assert sum(trace.meta["deepspeed"]["subgroup_params"]) == total // ranks
    assert trace.meta["deepspeed"]["activation_checkpointing"] is True
    assert "pretrain_gpt.py" in " ".join(trace.meta["command"])


@published
@each_watched
def test_a_monitor_gives_each_rank_its_device(watched: Callable[[Path], Trace], log: Path) -> None:
    trace = watched(log)
    with open(monitor_of(log), newline="") as file:
        rows = list(csv.DictReader(file))
    for rank in trace.ranks:
        own = sorted((r for r in rows if r["device_id"] == str(rank)), key=lambda r: int(r["timestamp"]))
        line = trace.memory(rank)
        line = line[line["pool"] == "device"]
        assert list(zip(line["t_ns"], line["bytes"], strict=True)) == [
            (int(r["timestamp"]), int(r["mem_used"])) for r in own
        ]
        link = trace.link(rank)
        assert list(link["t_ns"]) == [int(r["timestamp"]) for r in own]
        assert list(link["h2d_bytes_per_s"]) == [float(r["rxpci"]) * 2**20 for r in own]
        assert list(link["d2h_bytes_per_s"]) == [float(r["txpci"]) * 2**20 for r in own]
        assert set(link["window_ns"]) == {20 * MS}
        assert set(line["device"]) == set(link["device"]) == {f"cuda:{rank}"}
        device = trace.rank(rank)["devices"][0]
        assert device["capacity_bytes"] == int(own[0]["mem_used"]) + int(own[0]["mem_free"])
        assert device["link"] == {"generation": 5, "width": 16, "peak_bytes_per_s": pytest.approx(63.015e9, rel=1e-4)}
        pd.testing.assert_frame_equal(trace.phases(rank), trace.phases(0))
    assert summarize(trace).iterations == len(told_ms(log))
    windows = find_windows(trace, GIB, [1])
    assert windows.windows
    assert all(w.h2d_idle_share is not None and w.d2h_idle_share is not None for w in windows.windows)
    assert next(note for note in trace.notes if "rank 0 alone" in note).endswith("carry the same phases")


@published
def test_a_monitor_of_another_run_is_refused(tmp_path: Path) -> None:
    for log, other in zip(WATCHED, WATCHED[1:] + WATCHED[:1], strict=True):
        with pytest.raises(SourceError, match="do not meet in time") as error:
            import_trace([log, monitor_of(other)], tmp_path / "x.ebb")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "x.ebb").exists()


@published
def test_what_a_published_log_does_not_tell_is_said(alone: Callable[[Path], Trace]) -> None:
    for log in LOGS:
        said = sorted(note.split(",")[0].split(":")[0] for note in alone(log).notes)
        expected = [
            "the log marks allocated and reserved with the peak between marks (of reserved to the GiB)",
            "the memory of the device is not known",
        ]
        expected += ["the log times rank 0 alone"] if world_size(log) > 1 else []
        expected += [] if told_ms(log) else ["the log has no timers of whole steps"]
        # The earlier runs print no Unix times.
        expected += [] if unix(log, "step_start") else ["the log tells local times without their zone"]
        assert said == sorted(expected)


# Logs that are made up line by line, in the formats that DeepSpeed has had.


def line(second: float, text: str, kind: str = "INFO", where: str = "logging.py:96:log_dist") -> str:
    moment = datetime.datetime(2024, 4, 15, 10) + datetime.timedelta(seconds=second)
    return f"[{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}] [{kind}] [{where}] {text}"


def timers(**ms: float) -> str:
    return "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in ms.items())


def iteration(second: float, fwd: float = 100, bwd: float = 200, step: float = 50) -> list[str]:
    """Its lines; its timers are printed at `second`."""
    inner = {"bwd_inner": bwd - 20, "bwd_allreduce": 15}
    micro = {f"{name}_microstep": ms for name, ms in {"fwd": fwd, "bwd": bwd, **inner, "step": step}.items()}
    return [
        line(second, f"[Rank 0] {timers(optimizer_step=step - 10)}"),
        line(second, f"[Rank 0] {timers(**micro)}"),
        line(second, f"[Rank 0] {timers(fwd=fwd, bwd=bwd, **inner, step=step)}"),
    ]


def marked(second: float, word: str, ma: float = 1.0, most: float = 1.5, where: str = "before") -> list[str]:
    return [
        line(second, f"Engine {where} {word}", where="utils.py:800:see_memory_usage"),
        line(second, f"MA {ma} GB         Max_MA {most} GB         CA 2.0 GB         Max_CA 3 GB "),
        line(second, "CPU Virtual Memory:  used = 10.0 GB, percent = 5.0%"),
    ]


def steps(count: int = 5, **more: float) -> list[str]:
    return [text for number in range(count) for text in iteration(1.0 + number, **more)]


CONFIG = """json = {
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1.000000e+08
    },
    "wall_clock_breakdown": true
}"""


def imported(tmp_path: Path, lines: Iterable[str] | bytes, *beside: Path, end: str = "\n", **more: Any) -> Trace:
    file = tmp_path / "run.log"
    file.write_bytes(lines if isinstance(lines, bytes) else (end.join(lines) + end).encode())
    return import_trace([file, *beside], tmp_path / "run.ebb", force=True, **more)


def lengths_ms(trace: Trace) -> list[tuple[int, int, str, float]]:
    rows = trace.phases(0)
    ms = (rows["end_ns"] - rows["start_ns"]) / MS
    return [
        (int(i), int(m), p, d)
        for i, m, p, d in zip(rows["iteration"], rows["micro_step"], rows["phase"], ms, strict=True)
    ]


PLAIN = [(n, 0, phase, ms) for n in range(5) for phase, ms in zip(PHASES, (100.0, 200.0, 50.0), strict=True)]


def test_phases_end_where_their_timers_were_printed(tmp_path: Path) -> None:
    trace = imported(tmp_path, steps())
    assert lengths_ms(trace) == PLAIN
    ends = trace.phases(0)["end_ns"].iloc[2::3]
    assert list(ends) == [stamp_ns(line(1.0 + n, "")) for n in range(5)]
    ops = trace.ops(0)
    update = ops[ops["name"] == "optimizer_step"]
    assert list(update["end_ns"]) == list(ends)
    assert set(update["end_ns"] - update["start_ns"]) == {40 * MS}
    assert list(ops["name"])[:3] == ["bwd_inner", "bwd_allreduce", "optimizer_step"]
    backward = trace.phases(0).iloc[1]
    assert ops["start_ns"].iloc[0] == backward["start_ns"]
    assert ops["end_ns"].iloc[1] <= backward["end_ns"]


OLD = {"fwd": "forward", "bwd": "backward"}


def old(text: str) -> str:
    """As before DeepSpeed 0.10: other names, and the rank said twice."""
    for new, name in OLD.items():
        text = re.sub(rf"\b{new}", name, text)
    return text.replace("[Rank 0] ", "[Rank 0] rank=0 ")


def colored(text: str) -> str:
    return text.replace("[INFO]", "\x1b[32m[INFO]\x1b[0m").replace("time", "\x1b[1;33mtime\x1b[0m")


@pytest.mark.parametrize(
    "dialect",
    [
        old,
        colored,
        lambda text: f"worker-1: {text}",
        lambda text: f"[default0]:{text}",
        lambda text: f"[rank0]:{text}",
        lambda text: f"{text}\r",
        lambda text: f"  3%|#  | 12/345 [00:07<06:50,  1.23s/it]\r  4%|#  | 13/345 [00:07<06:50,  1.23s/it]{text}",
        lambda text: f"{text}[2024-04-15 10:00:00,000] [INFO] [rank 1 breaks in",
        lambda text: f"2024-04-15T10:00:00.5 \n{text}",
        lambda text: text.replace("[Rank 0] ", ""),
        lambda text: f"{text}\n[Rank 1] {timers(fwd=1, bwd=1, step=1)}",
        lambda text: f"{text}\n time (ms) | forward-backward: 7.00 | optimizer: 8.00 | batch-generator: 9.00",
        lambda text: f"{text}\ncomm op: all_reduce | time (ms): 12.00 | msg size: 4 KB | algbw (Gbps): 1.00",
        lambda text: f"{text}\n[Rank 0] time (ms) | fwd: 9.00 (fwd_moe: 1.00, 1st_a2a: 0.00, top_k: 0.00)",
        lambda text: f"{text}\n iteration 2/ 10 | elapsed time per iteration (ms): 7570.1 | lm loss: 1.18E+01 |",
    ],
)  # fmt: skip
def test_the_same_times_in_another_dialect(tmp_path: Path, dialect: Callable[[str], str]) -> None:
    lines = [*marked(0.1, "forward"), *steps()]
    first = imported(tmp_path, lines)
    other = imported(tmp_path, [dialect(text) for text in lines])
    pd.testing.assert_frame_equal(first.phases(0), other.phases(0))
    assert lengths_ms(other) == PLAIN
    pd.testing.assert_frame_equal(first.memory(0), other.memory(0))
    assert len(other.memory(0))
    assert not {"fwd", "forward", "fwd_microstep"} & set(other.ops(0)["name"])


def test_a_packed_log_and_one_with_windows_line_ends(tmp_path: Path) -> None:
    text = "\r\n".join(steps()).encode()
    plain, packed = imported(tmp_path, text), imported(tmp_path, gzip.compress(text))
    assert lengths_ms(plain) == lengths_ms(packed) == PLAIN


def test_a_log_that_was_cut_loses_only_its_last_step(tmp_path: Path) -> None:
    text = "\n".join(steps())
    whole = text.rindex("| step: ")
    # Wherever it is cut within the last line, no shortened figure is taken for a whole one.
    for cut in range(whole - 40, len(text)):
        assert lengths_ms(imported(tmp_path, text[:cut].encode())) == PLAIN[:12]
    assert lengths_ms(imported(tmp_path, text.encode())) == PLAIN


def micro(second: float, fwd: float, bwd: float, step: float = 0.05) -> str:
    return line(second, f"[Rank 0] {timers(fwd_microstep=fwd, bwd_microstep=bwd, step_microstep=step)}")


def test_micro_steps_add_up_to_the_step(tmp_path: Path) -> None:
    lines = []
    for number in range(5):
        at = 10.0 * number
        lines += [micro(at + 1, 100, 200), micro(at + 2, 101, 202), micro(at + 3, 102, 204, 50)]
        lines += [line(at + 3, timers(fwd=303.02, bwd=606.01, step=50.1))]
    trace = imported(tmp_path, lines)
    rows = lengths_ms(trace)
    assert [row[:3] for row in rows[:7]] == [
        *((0, number, phase) for number in range(3) for phase in PHASES[:2]),
        (0, 2, "update"),
    ]
    by_phase = {phase: summary for summary in summarize(trace).phases for phase in [summary.phase]}
    assert by_phase["forward"].median_ms == pytest.approx(303.02, abs=1e-6)
    assert by_phase["backward"].median_ms == pytest.approx(606.01, abs=1e-6)
    assert by_phase["update"].median_ms == pytest.approx(50.1, abs=1e-6)
    assert by_phase["forward"].count == 15
    ends = trace.phases(0)["end_ns"].to_numpy()
    assert [ends[1], ends[3]] == [stamp_ns(line(1, "")), stamp_ns(line(2, ""))]


def test_a_run_that_was_resumed_goes_on_counting(tmp_path: Path) -> None:
    broken_off = [micro(11, 500, 900), micro(12, 500, 900)]
    again = [micro(101, 50, 100), line(101, timers(fwd=100, bwd=200, step=50))]
    trace = imported(tmp_path, [*steps(2), *broken_off, micro(100, 50, 100), *again, *steps(1)])
    rows = lengths_ms(trace)
    # The micro-steps of the step that never came to its end are of no iteration.
    assert [row for row in rows if row[0] == 2] == [
        (2, 0, "forward", 50.0), (2, 0, "backward", 100.0), (2, 1, "forward", 50.0), (2, 1, "backward", 100.0),
        (2, 1, "update", 50.0),
    ]  # fmt: skip
    assert summarize(trace).iterations == 4
    # Its times begin anew, but no phase begins before the one before it has ended.
    assert (np.diff(trace.phases(0)[["start_ns", "end_ns"]].to_numpy().ravel()) >= 0).all()


def test_steps_that_lost_their_times_stand_beside_the_others(tmp_path: Path) -> None:
    lines = steps()
    bare = [text[text.index("] [Rank") + 2 :] if n < 6 or n >= 12 else text for n, text in enumerate(lines)]
    trace = imported(tmp_path, bare)
    assert lengths_ms(trace) == PLAIN
    starts, ends = (trace.phases(0)[name].to_numpy() for name in ("start_ns", "end_ns"))
    assert [ends[8], ends[11]] == [stamp_ns(line(3, "")), stamp_ns(line(4, ""))]
    assert ends[5] == starts[6]
    assert starts[12] == ends[11]


def test_a_skipped_step_is_an_iteration(tmp_path: Path) -> None:
    skip = line(3.5, "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4096, reducing to 4096")
    trace = imported(tmp_path, [*steps(3), skip, *iteration(4.0, step=0.21), *iteration(5.0)])
    assert [row[3] for row in lengths_ms(trace) if row[2] == "update"] == [50.0, 50.0, 50.0, 0.21, 50.0]


def test_todays_log_without_times(tmp_path: Path) -> None:
    trace = import_trace([DATA / "deepspeed-0.19.8-zero3-launcher.log"], tmp_path / "run.ebb")
    assert lengths_ms(trace) == [
        (0, 0, "forward", 47.98), (0, 0, "backward", 445.82), (0, 0, "update", 42.09),
        (1, 0, "forward", 18.92), (1, 0, "backward", 410.62), (1, 0, "update", 41.91),
    ]  # fmt: skip
    rows = trace.memory(0)
    phases = trace.phases(0)
    starts, ends = phases["start_ns"].to_numpy(), phases["end_ns"].to_numpy()
    assert (starts[1:] == ends[:-1]).all()
    allocated = rows[rows["pool"] == "allocated"]
    # At the beginning of the first backward 0.39 GiB, within it 0.41 at most, and 0.41 at its end.
    within = allocated[(allocated["t_ns"] >= starts[1]) & (allocated["t_ns"] <= ends[1])]
    assert within["bytes"].iloc[-1] == round(0.41 * GIB)
    assert within.groupby("t_ns")["bytes"].last().tolist() == [round(g * GIB) for g in (0.39, 0.41, 0.41)]
    assert list(trace.ops(0)["name"]) == ["bwd_inner", "bwd_allreduce", "optimizer_step"] * 2
    assert (trace.rank(0)["world_size"], trace.ranks) == (2, [0, 1])
    assert trace.meta["deepspeed"] == {
        "version": None, "config": None, "subgroup_params": None, "activation_checkpointing": None
    }  # fmt: skip
    assert [note.split(":")[0] for note in trace.notes] == [
        "the log has no times of day",
        "the log marks allocated and reserved with the peak between marks (of reserved to the GiB), which is taken for "
        "all that time",
        "the log has no DeepSpeed configuration (json = ...)",
        "the log does not tell the number of parameters",
        "the log times rank 0 alone",
        "memory marks that have no time and stand at no phase are left out",
        "the memory of the device is not known, so nothing can be called free",
    ]
    assert "left out: 2" in trace.notes[5]


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "micro_steps"), [("zero2-accumulation", 1, 2, 3), ("zero3-torchrun", 2, 3, 2)]
)
def test_todays_logs_with_accumulation(tmp_path: Path, name: str, ranks: int, stage: int, micro_steps: int) -> None:
    log = DATA / f"deepspeed-0.19.8-{name}.log"
    trace = import_trace([log], tmp_path / "run.ebb")
    config = trace.meta["deepspeed"]["config"]
    assert (config["zero_optimization"]["stage"], config["gradient_accumulation_steps"]) == (stage, micro_steps)
    assert config["zero_optimization"]["sub_group_size"] == 3e5
    assert trace.meta["deepspeed"]["version"] == "0.19.8"
    assert trace.rank(0)["optimizers"] == [{"class": "DeepSpeedCPUAdam", "params": None}]
    assert trace.ranks == list(range(ranks))
    for number, told in enumerate(told_ms(log)):
        rows = [row for row in lengths_ms(trace) if row[0] == number]
        assert len(rows) == 2 * micro_steps + 1
        for phase in PHASES:
            assert sum(row[3] for row in rows if row[2] == phase) == pytest.approx(told[phase], abs=1e-6)
    allocated = trace.memory(0)[lambda rows: rows["pool"] == "allocated"]
    # The marks of setting up have no place; all others do, each at a beginning or an end.
    told_gib = re.findall(r"\bMA ([\d.]+) GB", log.read_text())
    points = set(trace.phases(0)[["start_ns", "end_ns"]].to_numpy().ravel())
    assert len(allocated[allocated["t_ns"].isin(points)]) == len(told_gib) - 2
    assert [note for note in trace.notes if "left out: 2" in note]


def stamped(log: Path, zone: str = "", seconds: float = 0.1) -> list[str]:
    """A log as `ts` or docker would have written it, a line every so often."""
    start = datetime.datetime(2026, 3, 1, 12)
    lines = log.read_text().splitlines()
    times = [start + datetime.timedelta(seconds=seconds * n) for n in range(len(lines))]
    return [f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond:06d}{zone} {text}" for at, text in zip(times, lines, strict=True)]


@pytest.mark.parametrize(("zone", "hours"), [("", 0.0), ("Z", 0.0), ("+05:30", 5.5), ("-0330", -3.5)])
def test_a_log_with_times_put_before_its_lines(tmp_path: Path, zone: str, hours: float) -> None:
    log = DATA / "deepspeed-0.19.8-zero2-accumulation.log"
    trace = imported(tmp_path, stamped(log, zone))
    assert trace.meta["deepspeed"]["config"]["gradient_accumulation_steps"] == 3
    lines = log.read_text().splitlines()
    printed = next(n for n, text in enumerate(lines) if "| fwd: " in text)
    first = int(datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC).timestamp() * 1e9 - hours * 3.6e12)
    update = trace.phases(0)[lambda rows: rows["phase"] == "update"].iloc[0]
    marked_ns = first + next(n for n, t in enumerate(lines[:printed]) if "Engine before step" in t) * MS * 100
    assert marked_ns <= update["start_ns"] <= update["end_ns"] <= first + printed * MS * 100
    # Of these a backward ends with the mark behind it, which DeepSpeed takes within its timer.
    over = [n + 1 for n, text in enumerate(lines) if "Engine after backward" in text]
    backward = trace.phases(0)[lambda rows: rows["phase"] == "backward"]
    assert list(backward["end_ns"]) == [first + n * 100 * MS for n in over]
    assert any("without their zone" in note for note in trace.notes) == (zone == "")
    assert len(trace.memory(0)[lambda rows: rows["pool"] == "host"]) == len(re.findall("CPU Virtual", log.read_text()))


@pytest.mark.parametrize(
    ("lines", "phases", "notes"),
    [
        (marked(1, "forward") + marked(2, "forward", where="after"), 0, ["no timers of whole steps"]),
        (steps(), 5, ["has no memory marks"]),
        ([line(0, CONFIG), *steps()], 5, []),
        ([line(0, CONFIG.replace('"stage":', '"stage"')), *steps()], 5, ["a damaged DeepSpeed configuration"]),
        ([line(0, CONFIG[:60]), *steps()], 5, ["a damaged DeepSpeed configuration"]),
        ([line(0, "dist_world_size=2"), *steps()], 5, ["the log times rank 0 alone"]),
    ],
)
def test_what_a_log_does_not_tell_is_said_and_no_more(
    tmp_path: Path, lines: list[str], phases: int, notes: list[str]
) -> None:
    trace = imported(tmp_path, lines)
    assert summarize(trace).iterations == phases
    known = {
        "no timers of whole steps": phases == 0,
        "has no memory marks": phases > 0,
        "no DeepSpeed configuration": "json" not in " ".join(lines),
        "a damaged DeepSpeed configuration": "damaged" in " ".join(notes),
        "number of parameters": True,
        "number of ranks: taken as 1": "dist_world_size" not in " ".join(lines),
        "rank 0 alone": "dist_world_size" in " ".join(lines),
        "without their zone": True,
        "no times of day": False,
        "left out": False,
        "the time zone of the log": False,
    }
    assert {text: any(text in note for note in trace.notes) for text in known} == known
    for text in notes:
        assert any(text in note for note in trace.notes)


@pytest.mark.parametrize(
    "lines",
    [
        ["deepspeed was here"],
        [line(0, "DeepSpeedEngine configuration:"), line(0, CONFIG)],
        [micro(1, 100, 200)],
        [line(1, timers(fwd=1, bwd=2))],
        ["MA 1.0 GB         Max_MA 1.0 GB         CA 2.0 GB         Max_CA 3 GB", "DeepSpeed"],
    ],
)
def test_a_log_with_nothing_to_tell_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(SourceError, match="turn on wall_clock_breakdown"):
        imported(tmp_path, lines)
    assert not (tmp_path / "run.ebb").exists()


def monitor_csv(path: Path, start_ns: int, seconds: float, step: float = 0.1, devices: Iterable[int] = (0, 1)) -> Path:
    rows = [
        f"{device},{start_ns + int(n * step * 1e9)},{1000 + n},{8000 - n},1.5,2.5"
        for n in range(int(seconds / step))
        for device in devices
    ]
    path.write_text("index,timestamp,memory.used [MiB],memory.free [MiB],rxpci,txpci\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("hours", [-9.5, -4.0, 0.0, 1.0, 5.75, 12.75])
def test_a_zone_is_found_by_the_monitor_beside_it(tmp_path: Path, hours: float) -> None:
    start = stamp_ns(line(0, "")) - int(hours * 3.6e12)
    trace = imported(tmp_path, steps(60), monitor_csv(tmp_path / "m.csv", start - 10**9, 70))
    last = trace.phases(0)["end_ns"].iloc[-1]
    assert last == start + 60 * 10**9
    told = [note for note in trace.notes if "clock is taken to be" in note]
    assert bool(told) == (hours != 0)
    assert all(f"UTC{hours:+.4g} h" in note for note in told)
    assert not any("without their zone" in note for note in trace.notes)


def test_several_zones_that_fit_are_a_guess(tmp_path: Path) -> None:
    start = stamp_ns(line(0, ""))
    csv_file = monitor_csv(tmp_path / "m.csv", start - 8 * 3600 * 10**9, 14 * 3600, step=60, devices=[0])
    trace = imported(tmp_path, steps(60), csv_file)
    assert [note for note in trace.notes if "the time zone of the log is a guess (UTC+0 h)" in note]
    assert trace.phases(0)["end_ns"].iloc[-1] == start + 60 * 10**9


def test_a_monitor_that_covers_a_part_of_a_log_is_told(tmp_path: Path) -> None:
    unix_line = line(0, f"<<<TIMER:step_start,{stamp_ns(line(0, ''))}>>>")
    start = stamp_ns(line(0, ""))
    trace = imported(tmp_path, [unix_line, *steps(60)], monitor_csv(tmp_path / "m.csv", start, 30))
    assert [note for note in trace.notes if "m.csv covers only 49% of the time of the log" in note]
    with pytest.raises(SourceError, match="do not meet in time"):
        imported(tmp_path, [unix_line, *steps(60)], monitor_csv(tmp_path / "m.csv", start + 100 * 10**9, 30))


def test_a_log_or_a_monitor_without_dates_cannot_be_joined(tmp_path: Path) -> None:
    own = DATA / "deepspeed-0.19.8-zero3-launcher.log"
    with pytest.raises(SourceError, match=r"launcher\.log has no dates, so it cannot be put beside other files.*\| ts"):
        import_trace([own, monitor_csv(tmp_path / "m.csv", 10**18, 5)], tmp_path / "x.ebb")
    (tmp_path / "d.txt").write_text("# gpu     fb\n# Idx     MB\n    0   1000\n")
    with pytest.raises(SourceError, match=r"d\.txt has no dates.*dmon -o DT"):
        imported(tmp_path, steps(), tmp_path / "d.txt")
    unknown = {"name": "unknown", "host": None, "wall_offset_ns": None}
    for number, file in enumerate((own, tmp_path / "d.txt")):
        assert import_trace([file], tmp_path / f"{number}.ebb").meta["clock"] == unknown


def test_ranks_follow_the_devices_of_their_host(tmp_path: Path) -> None:
    start = stamp_ns(line(0, ""))
    lines = [line(0, "dist_world_size=4"), line(0, "Setting CUDA_VISIBLE_DEVICES=6,7"), *steps(60)]
    trace = imported(tmp_path, lines, monitor_csv(tmp_path / "m.csv", start, 61, devices=[5, 6, 7]))
    assert [trace.rank(rank)["devices"][0]["device"] for rank in range(4)] == ["cuda:6", "cuda:7", "cuda:6", "cuda:7"]
    # A monitor file is of one host; which of two it is of nothing tells, so it goes to the first ranks.
    assert [len(trace.link(rank)) > 0 for rank in range(4)] == [True, True, False, False]
    assert [len(trace.phases(rank)) for rank in range(4)] == [180, 180, 0, 0]
    assert "m.csv: devices 5 are not of this job and left out" in trace.notes


def test_a_job_of_many_ranks_stays_small(tmp_path: Path) -> None:
    for world, entries in ((4096, 64), (99_999_999, 1)):
        trace = imported(tmp_path, [line(0, f"dist_world_size={world}"), *steps()])
        assert len(trace.ranks) == entries
        assert trace.rank(0)["world_size"] == (world if world <= 1 << 20 else None)
        assert any("the trace has the first 64" in note for note in trace.notes) == (world == 4096)


@pytest.mark.parametrize("prefix", ["", "worker-1: ", "[default0]:"])
def test_a_configuration_between_lines_of_other_ranks(tmp_path: Path, prefix: str) -> None:
    own = [prefix + text for text in line(0, CONFIG).splitlines()]
    other = ["[default1]: }", "worker-2: }"] if prefix else [line(0, "Warning }"), "a warning of rank 1: {'a': 1}"]
    lines = [text for pair in zip(own, other * 4, strict=False) for text in pair]
    trace = imported(tmp_path, [*lines, f"{prefix}{line(1, 'dist_world_size=2')}", *steps()])
    assert trace.meta["deepspeed"]["config"] == {
        "zero_optimization": {"stage": 3, "sub_group_size": 1e8},
        "wall_clock_breakdown": True,
    }
    assert trace.ranks == [0, 1]


def test_parts_of_the_model_are_added_up(tmp_path: Path) -> None:
    told = [f" > number of parameters on (tensor, pipeline) model parallel rank ({n}, 0): {10 + n}" for n in (0, 1, 0)]
    lines = [*told, line(0, "dist_world_size=4"), line(0, CONFIG), *steps()]
    assert imported(tmp_path, lines).rank(0)["model"] == {"total_params": 21, "params": 6}
    rounded = line(0, "finished initializing model - num_params = 283, num_elems = 11.32B")
    assert imported(tmp_path, [rounded, *steps()]).rank(0)["model"]["total_params"] == 11_320_000_000


def test_recognition_is_by_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for text, expected in [
        ("\n" * 1000 + steps()[0], True),
        ("time (ms) | fwd: 1.00", True),
        ("MA 1.0 GB         Max_MA 1.0 GB", True),
        ("a novel about the deep sea", False),
        ("DeepSpeed\0", False),
        ("\n" * 100_001 + "DeepSpeed", False),
    ]:
        file.write_text(text)
        assert deepspeed_log.matches(Source(file)) is expected
