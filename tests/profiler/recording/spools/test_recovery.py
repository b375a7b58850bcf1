"""Tests of the recovery of spools: complete, cut off and damaged."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbtide import seams
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import Spool
from ebbtide.profiler.recording.lifecycle import finish
from ebbtide.profiler.recording.spools.records import read_records
from ebbtide.profiler.recording.spools.recovery import RankData, recover
from ebbtide.profiler.trace.builder import TraceBuilder
from ebbtide.profiler.trace.files import open_trace
from ebbtide.profiler.trace.metadata import DeviceInfo
from ebbtide.seams import Feature
from tests.conftest import FUZZ

META: dict[str, Any] = {
    "host": {"name": "here", "cpu": {"device": "cpu", "kind": "cpu"}, "gpus": []}
}
SIZE = kinds.RECORD.size
FORWARD, BACKWARD, UPDATE = range(3)
Record = dict[str, int]


def phase(code: int, sequence: int) -> Record:
    """Return a phase record: of the 10 ns of its sequence number it takes 8."""
    return {
        "kind": kinds.PHASE,
        "code": code,
        "a": sequence,
        "x": 10 * sequence,
        "y": 10 * sequence + 8,
    }


def ends(number: int, sequence: int) -> Record:
    return {"kind": kinds.ITERATION, "a": number, "b": sequence, "x": 10 * sequence + 8}


def step(
    number: int, codes: Sequence[int] = (FORWARD, BACKWARD, UPDATE)
) -> list[Record]:
    """Return the records of an iteration with these phases, and a memory sample in
    each."""
    heap, first = kinds.POOLS.index("heap"), number * len(codes) + 1
    records = []
    for n, code in enumerate(codes, first):
        memory = {
            "kind": kinds.MEMORY,
            "code": heap,
            "small": kinds.HOST,
            "x": 10 * n + 5,
            "y": 1000 + n,
        }
        records += [phase(code, n), memory]
    return [*records, ends(number, first + len(codes) - 1)]


def stop(reason: str) -> Record:
    return {"kind": kinds.STOPPED, "code": kinds.STOP_REASONS.index(reason), "x": 10**6}


FOUR = [record for number in range(4) for record in step(number)] + [stop("closed")]


def written(
    folder: Path,
    records: Sequence[Record],
    number: int = 1,
    rank: int = 0,
    kind: str = "agent",
    world_size: int = 1,
) -> Path:
    """Write a spool with a header and these records."""
    path = folder / f"{kind}-here-{number}.spool"
    spool = Spool(str(path))
    spool.put_header(rank, world_size, 0)
    for record in records:
        spool.put(**record)
    spool.close()
    return path


def recovered(folder: Path, **meta: Any) -> tuple[RankData, list[str]]:
    (training,) = recover(folder, META | meta)
    (data,) = training.ranks
    assert all(len(note.splitlines()) == 1 for note in training.notes)
    return data, training.notes


def column(data: RankData, name: str, table: str = "phases") -> list[Any]:
    return [
        None if pd.isna(value) else value for value in data.tables[table][name].tolist()
    ]


def test_recover__reads_iterations_phases_and_memory_of_a_complete_spool(
    tmp_path: Path,
) -> None:
    data, notes = recovered(written(tmp_path, FOUR, rank=2).parent)
    assert notes == []
    assert (data.meta["rank"], data.meta["pid"], data.meta["stopped"]) == (
        2,
        os.getpid(),
        "closed",
    )
    assert column(data, "iteration") == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert column(data, "phase") == ["forward", "backward", "update"] * 4
    assert column(data, "start_ns") == [10 * n for n in range(1, 13)]
    assert column(data, "end_ns") == [10 * n + 8 for n in range(1, 13)]
    assert column(data, "bytes", "memory") == [1000 + n for n in range(1, 13)]
    assert set(column(data, "device", "memory")) == {"cpu"}
    assert data.meta["first_iteration_start_ns"] == 10


def test_recover__reads_kernels_of_the_requested_iterations_from_slices(
    tmp_path: Path,
) -> None:
    # A kernel in each iteration (of 30 ns), and one that begins when the host has ended
    # the third.
    starts = [15, 45, 75, 100, 110]
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "ts": start / 1000,
            "dur": 0.005,
            "args": {"correlation": start},
        }
        for start in starts
    ]
    events += [
        {**event, "cat": "cuda_runtime", "ts": event["ts"] - 0.004} for event in events
    ]

    def recovered_slices(records: Sequence[Record], **options: Any) -> RankData:
        (tmp_path / "agent-here-1.spool").unlink(missing_ok=True)
        header = read_records(written(tmp_path, records), [])[0]  # type: ignore[index]
        trace = {
            "baseTimeNanoseconds": int(header["y"]) - int(header["x"]),
            "traceEvents": events,
        }
        (tmp_path / "here-1-copies-9-130.json").write_text(json.dumps(trace))
        data, _ = recovered(tmp_path, options={"transfers": True, **options})
        assert data.meta["transfers_spans_ns"] == [(9, 130)]
        return data

    data = recovered_slices(FOUR)
    assert column(data, "start_ns", "kernels") == starts
    assert column(data, "launch_ns", "kernels") == [start - 4 for start in starts]
    device_times = {"kind": kinds.GPU_TIMES, "a": 9, "x": 92, "y": 101}
    records = [{"kind": kinds.START, "a": 1, "x": 38}, *step(1), *step(2), device_times]
    data = recovered_slices(records, iterations=[1, 3])
    assert column(data, "start_ns", "kernels") == [45, 75, 100]


def test_recover__reads_the_complete_records_of_a_spool_cut_at_any_byte(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, FOUR)
    raw = path.read_bytes()
    lengths = sorted(
        {*range(0, len(raw), max(1, round(41 / FUZZ))), *range(0, len(raw), SIZE)}
    )
    for length in lengths[:: 3 if FUZZ <= 1 else 1]:
        path.write_bytes(raw[:length])
        if length < SIZE:
            (training,) = recover(tmp_path, META)
            assert (training.ranks, len(training.notes)) == ([], 1)
            continue
        complete = FOUR[: length // SIZE - 1]
        data, notes = recovered(tmp_path)
        assert len(notes) == 1
        assert "its recording has no end" in notes[0]
        assert len(data.tables["memory"]) == sum(
            record["kind"] == kinds.MEMORY for record in complete
        )
        last = max(
            (record["b"] for record in complete if record["kind"] == kinds.ITERATION),
            default=0,
        )
        phases = [record["a"] for record in complete if record["kind"] == kinds.PHASE]
        assert column(data, "iteration") == [
            (n - 1) // 3 if n <= last else None for n in phases
        ]


def test_recover__lets_a_later_record_extend_an_iteration(tmp_path: Path) -> None:
    codes = (FORWARD, BACKWARD, UPDATE, BACKWARD, UPDATE, FORWARD, BACKWARD, UPDATE)
    phases = [phase(code, sequence) for sequence, code in enumerate(codes, 1)]
    records = [
        *phases[:3],
        ends(0, 3),
        *phases[3:5],
        ends(0, 5),
        *phases[5:],
        ends(1, 8),
    ]
    data, _ = recovered(written(tmp_path, records).parent)
    assert column(data, "iteration") == [0] * 5 + [1] * 3


def test_recover__leaves_an_unfinished_iteration_null(tmp_path: Path) -> None:
    data, _ = recovered(
        written(tmp_path, [*step(0), phase(FORWARD, 4), phase(BACKWARD, 5)]).parent
    )
    assert column(data, "iteration") == [0, 0, 0, None, None]


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("closed", None),
        ("iterations", None),
        ("max-size", "--max-size"),
        ("fault", "fault"),
    ],
)
def test_recover__reports_how_a_recording_ended(
    tmp_path: Path, reason: str, says: str | None
) -> None:
    data, notes = recovered(written(tmp_path, [stop(reason)]).parent)
    assert data.meta["stopped"] == reason
    assert [says in note for note in notes if says] == ([True] if says else [])
    assert len(notes) == (says is not None)


def test_micro_steps__begin_with_a_forward_after_a_backward(tmp_path: Path) -> None:
    codes = (
        FORWARD,
        FORWARD,
        BACKWARD,
        FORWARD,
        BACKWARD,
        BACKWARD,
        FORWARD,
        BACKWARD,
        UPDATE,
    )
    data, _ = recovered(written(tmp_path, step(0, codes) + step(1, codes)).parent)
    assert column(data, "micro_step") == [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2


def test_recover__joins_device_times_with_their_phases_exactly(tmp_path: Path) -> None:
    times = [(3, 2**60 + 5, 2**60 + 7), (1, 11, 17)]
    records = [
        {"kind": kinds.GPU_TIMES, "a": sequence, "x": start, "y": end}
        for sequence, start, end in times
    ]
    data, _ = recovered(written(tmp_path, step(0) + records).parent)
    assert column(data, "gpu_start_ns") == [11, None, 2**60 + 5]
    assert column(data, "gpu_end_ns") == [17, None, 2**60 + 7]


@pytest.mark.parametrize(
    ("iterations", "kept"),
    [((1, 3), [1, 1, 1, 2, 2, 2]), ((1, None), [1, 1, 1, 2, 2, 2, None])],
)
def test_recover__keeps_only_the_configured_iterations(
    tmp_path: Path, iterations: tuple[int, int], kept: list[int]
) -> None:
    start = {"kind": kinds.START, "a": 1, "x": 39}
    records = [
        *step(0),
        start,
        *step(1),
        *step(2),
        *(step(3) if iterations[1] else [phase(FORWARD, 10)]),
    ]
    data, _ = recovered(
        written(tmp_path, records).parent, options={"iterations": list(iterations)}
    )
    assert column(data, "iteration") == kept
    # the first: what was held then
    assert column(data, "t_ns", "memory") == [39, 45, 55, 65, 75, 85, 95]
    assert data.meta["first_iteration_start_ns"] == 39


def op(name: str, sequence: int, start: int, end: int, **fields: int) -> Record:
    """Return an operation record: no subgroup, bytes or parent, and on the host, unless
    `fields` change that."""
    none = {
        "b": kinds.NO_SUBGROUP,
        "w": kinds.MISSING,
        "z": kinds.MISSING,
        "small": kinds.HOST,
    }
    return {
        "kind": kinds.OP,
        "code": kinds.OPS.index(name),
        "a": sequence,
        "x": start,
        "y": end,
        **none,
        **fields,
    }


def with_ops(number: int) -> list[Record]:
    """Return an iteration with a copy inside a reduction in its backward, and the
    update of a subgroup on a GPU."""
    first = 6 * number + 1
    begin_ns = 100 * number
    return [
        phase(FORWARD, first) | {"x": begin_ns, "y": begin_ns + 10},
        op(
            "gradient down",
            first + 2,
            begin_ns + 22,
            begin_ns + 25,
            w=4096,
            z=first + 1,
        ),
        op("reduce", first + 1, begin_ns + 20, begin_ns + 28),
        phase(BACKWARD, first + 3) | {"x": begin_ns + 10, "y": begin_ns + 30},
        op(
            "update",
            first + 4,
            begin_ns + 30,
            begin_ns + 31,
            b=7,
            c=kinds.RESOURCES.index("gpu"),
            small=0,
        ),
        phase(UPDATE, first + 5) | {"x": begin_ns + 30, "y": begin_ns + 40},
        {
            "kind": kinds.GPU_TIMES,
            "a": first + 4,
            "x": begin_ns + 35,
            "y": begin_ns + 55,
        },
        {"kind": kinds.ITERATION, "a": number, "b": first + 5, "x": begin_ns + 40},
    ]


def test_recover__reads_operations_with_parents_and_device_times(
    tmp_path: Path,
) -> None:
    records = [*with_ops(0), *with_ops(1), op("rest", 13, 220, 230)]
    data, _ = recovered(written(tmp_path, records).parent)
    assert column(data, "name", "ops") == ["reduce", "gradient down", "update"] * 2 + [
        "rest"
    ]
    assert column(data, "iteration", "ops") == [0, 0, 0, 1, 1, 1, None]
    assert column(data, "resource", "ops") == ["host", "host", "gpu"] * 2 + ["host"]
    assert column(data, "subgroup", "ops") == [None, None, 7] * 2 + [None]
    assert column(data, "bytes", "ops") == [None, 4096, None] * 2 + [None]
    assert column(data, "parent", "ops") == [None, 0, None, None, 3, None, None]
    assert column(data, "start_ns", "ops") == [20, 22, 35, 120, 122, 135, 220]
    assert column(data, "end_ns", "ops") == [28, 25, 55, 128, 125, 155, 230]
    assert column(data, "phase") == ["forward", "backward", "update"] * 2
    assert column(data, "gpu_start_ns") == [None] * 6


def test_recover__drops_operations_of_other_iterations(tmp_path: Path) -> None:
    written(tmp_path, [record for number in range(4) for record in with_ops(number)])
    data, _ = recovered(tmp_path, options={"iterations": [1, 3]})
    assert column(data, "iteration", "ops") == [1, 1, 1, 2, 2, 2]
    assert column(data, "parent", "ops") == [None, 0, None, None, 3, None]


@pytest.mark.parametrize(
    ("field", "value"), [("code", len(kinds.OPS)), ("c", len(kinds.RESOURCES))]
)
def test_recover__drops_operations_with_an_invalid_name_or_resource(
    tmp_path: Path, field: str, value: int
) -> None:
    data, _ = recovered(
        written(
            tmp_path, [op("rest", 1, 0, 5), op("rest", 2, 5, 9) | {field: value}]
        ).parent
    )
    assert column(data, "end_ns", "ops") == [5]


def test_open_trace__takes_the_section_of_a_framework_from_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = Feature("hello", {"setups": {"hello": "setup:read"}})
    monkeypatch.setattr(seams, "features", lambda: {"hello": feature})
    builder = TraceBuilder("recorded", host=META["host"])
    path = builder.write(tmp_path / "run.ebb").path
    meta = json.loads((path / "meta.json").read_text()) | {"state": "recording"}
    (path / "meta.json").write_text(json.dumps(meta))
    (path / "spool").mkdir()
    for number, section in ((3, [1, 2]), (2, {"stage": 2}), (1, {"stage": 3})):
        written(path / "spool", FOUR, number, rank=3 - number, world_size=3)
        (path / "spool" / f"facts-here-{number}.json").write_text(
            json.dumps({"hello": section})
        )
    for trace in (open_trace(path), *finish(path, {})):
        assert trace.raw_meta["hello"] == {"stage": 2}
        assert not any("hello" in entry for entry in trace.raw_meta["ranks"])


def test_finish__keeps_keys_that_the_format_does_not_specify(tmp_path: Path) -> None:
    path = recording(
        tmp_path,
        {"backend": "nccl", "devices": [{"device": "cpu", "ecc": True}]},
        cluster="north",
    )
    finish(path, {"exit": {"code": 0}})
    raw_meta = open_trace(path).raw_meta
    assert (raw_meta["state"], raw_meta["cluster"], raw_meta["exit"]) == (
        "complete",
        "north",
        {"code": 0},
    )
    assert raw_meta["ranks"][0]["backend"] == "nccl"
    assert raw_meta["ranks"][0]["devices"] == [{"device": "cpu", "ecc": True}]


@pytest.mark.parametrize(
    "job_info",
    [
        3,
        [],
        {"devices": [3]},
        {"devices": {}},
        {"threads": "many"},
        {"notes": 3},
        {"notes": [3]},
        {"argv": [None]},
    ],
)
def test_open_trace__ignores_a_damaged_description_of_a_process(
    tmp_path: Path, job_info: Any
) -> None:
    entry = open_trace(recording(tmp_path, job_info)).rank(0)
    assert (entry.rank, entry.stopped, entry.main_device) == (
        0,
        "closed",
        DeviceInfo(device="cpu", kind="cpu"),
    )


def recording(folder: Path, job_info: Any, **meta: Any) -> Path:
    """Write an unfinished trace of one rank, with this description of its process."""
    path = (
        TraceBuilder("recorded", host=META["host"], **meta)
        .write(folder / "run.ebb")
        .path
    )
    raw_meta = json.loads((path / "meta.json").read_text()) | {"state": "recording"}
    (path / "meta.json").write_text(json.dumps(raw_meta))
    (path / "spool").mkdir()
    written(path / "spool", FOUR)
    (path / "spool" / "facts-here-1.json").write_text(json.dumps(job_info))
    return path


@pytest.mark.parametrize(
    ("world_size", "said", "trainings"),
    [
        (1, (0, 0), [[0], [0]]),
        (2, (1, 0), [[0, 1]]),
        (2, (0, 1, 0, 1), [[0, 1], [0, 1]]),
        (2, (0, 1, 0), [[0, 1], [0]]),
    ],
    ids=["independent processes", "one job", "restarted", "restarted in part"],
)
def test_recover__makes_a_training_of_the_ranks_of_one_job(
    tmp_path: Path, world_size: int, said: tuple[int, ...], trainings: list[list[int]]
) -> None:
    for order, rank in enumerate(said):
        written(tmp_path, FOUR, number=9 - order, rank=rank, world_size=world_size)
    recovered_trainings = recover(tmp_path, META)
    assert [
        [data.meta["rank"] for data in training.ranks]
        for training in recovered_trainings
    ] == trainings
    starts = [
        min(data.meta["started_ns"] for data in training.ranks)
        for training in recovered_trainings
    ]
    assert starts == sorted(starts)


def test_recover__ends_a_program_where_its_process_executed_another(
    tmp_path: Path,
) -> None:
    written(tmp_path, FOUR[:-1], number=1)
    written(tmp_path, FOUR, number=2)
    first, second = recover(tmp_path, META)
    assert [first.ranks[0].meta["stopped"], second.ranks[0].meta["stopped"]] == [
        "exec",
        "closed",
    ]
    assert first.notes == [
        "rank 0: its recording ends where the process executed another program (exec)"
    ]
    assert second.notes == []


def test_recover__leaves_out_a_process_that_only_ran_forwards(tmp_path: Path) -> None:
    written(tmp_path, [phase(FORWARD, 1), stop("closed")], number=1)
    written(tmp_path, FOUR, number=2)
    (training,) = recover(tmp_path, META)
    assert len(training.ranks[0].tables["phases"]) == 12


def test_finish__writes_a_trace_for_each_training(tmp_path: Path) -> None:
    path = recording(tmp_path, {})
    written(path / "spool", [*step(0), stop("closed")], number=2)
    (tmp_path / "run-2.ebb").mkdir()
    traces = finish(path, {})
    assert [trace.path.name for trace in traces] == ["run.ebb", "run-3.ebb"]
    assert [open_trace(trace.path).rank(0).rank for trace in traces] == [0, 0]
    assert (
        "training 1 of 2: the command ran several; see also run-3.ebb"
        in open_trace(path).notes[0]
    )
    assert len(open_trace(tmp_path / "run-3.ebb").phases(0)) < len(
        open_trace(path).phases(0)
    )


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda raw: b"", "holds no records"),
        (lambda raw: b"\0" * len(raw), "holds no records"),
        (lambda raw: raw[SIZE:], "holds no records"),
        (lambda raw: raw[:1] + bytes([kinds.VERSION + 1]) + raw[2:], "another version"),
    ],
    ids=["empty", "zeros", "headless", "other version"],
)
def test_recover__notes_files_that_are_not_spools_of_this_version(
    tmp_path: Path, edit: Callable[[bytes], bytes], says: str
) -> None:
    written(tmp_path, FOUR)
    for path in (
        written(tmp_path, FOUR, 2),
        written(tmp_path, FOUR, 3, kind="sampler"),
    ):
        path.write_bytes(edit(path.read_bytes()))
    data, notes = recovered(tmp_path)
    assert column(data, "phase") == ["forward", "backward", "update"] * 4
    assert [note.split()[0] for note in sorted(notes)] == [
        "agent-here-2.spool",
        "sampler-here-3.spool",
    ]
    assert all(says in note for note in notes)


def raw_record(kind: int, code: int, fields: bytes) -> bytes:
    return bytes([kind, code]) + fields


FIELDS_SIZE = SIZE - 2
garbled = st.builds(
    raw_record,
    st.integers(0, 10),
    st.integers(0, 255),
    st.binary(min_size=FIELDS_SIZE, max_size=FIELDS_SIZE),
)


@given(st.binary(max_size=3 * SIZE) | garbled)
@example(raw_record(kinds.PHASE, 99, bytes(FIELDS_SIZE)))
def test_recover__reads_all_records_before_garbage(tail: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), FOUR)
        path.write_bytes(path.read_bytes() + tail)
        data, _ = recovered(Path(folder))
        kept = {record["x"] for record in FOUR if record["kind"] == kinds.PHASE}
        assert kept <= set(column(data, "start_ns"))
        assert {1000 + n for n in range(1, 13)} <= set(column(data, "bytes", "memory"))
