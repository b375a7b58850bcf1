"""Files of torch.profiler that are cut, damaged or of another kind."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.features.importers.kineto.importer import KinetoImporter, read_trace
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder
from ebbtide.profiler.trace.metadata import DeviceInfo
from tests.conftest import examples, slow_case
from tests.features.importers.kineto.made_kineto import (
    import_files,
    in_order,
    iteration,
    launched,
    memory_event,
    shape,
    span,
    write_trace,
)
from tests.features.importers.kineto.test_kineto import CARDS, copied


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"traceEvents": []}', True),
        (' {\n "schemaVersion": 1, "deviceProperties": [', True),
        ('\ufeff{"otherData": {}, "traceEvents" : [', True),
        ('[{"name": "a", "ph": "X"}', True),
        ('{"rank": 0}', False),
        ("[[-1, 1, 37888, 7]]", False),
        ("timestamp, traceEvents", False),
        ("\x80\x04", False),
    ],
)
def test_matches__decides_by_content(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "file").write_text(text)
    assert KinetoImporter().matches(Source(tmp_path / "file")) is expected


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"traceEvents": []}',
        '{"traceEvents": 3}',
        '{"traceEvents": [{"ph',
        "[3, 4]",
    ],
)
def test_read_trace__raises_one_error_for_files_without_events(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(SourceError, match=r"run\.json") as error:
        read_trace(Source(tmp_path / "run.json"), TraceBuilder(), 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", [slow_case(False), True])
def test_read_trace__reads_a_cut_file_up_to_the_cut(
    tmp_path: Path, packed: bool
) -> None:
    work = [
        event for number in range(1000) for event in iteration(number, 200 * number)
    ]
    path = write_trace(tmp_path / ("run.json.gz" if packed else "run.json"), work)
    path.write_bytes(path.read_bytes()[:-300])
    trace = import_files(path)
    (note,) = (
        note for note in trace.notes if "the events before that are imported" in note
    )
    assert note.startswith(f"{path.name}: it ")
    assert str(tmp_path) not in note
    assert len(shape(trace.phases(0))) > 500


def test_read_trace__leaves_out_and_counts_invalid_events(tmp_path: Path) -> None:
    invalid = [
        span("a", -1e300, 0),
        span("b", 5, 4),
        {"ph": "X", "ts": "soon"},
        3,
        None,
        [[]],
        {"ts": {}},
    ]
    trace = import_files(
        write_trace(
            tmp_path / "run.json", [*iteration(0, 0), *invalid, *iteration(1, 100)]
        )
    )
    assert shape(trace.phases(0)) == {0: "fbu", 1: "fbu"}
    assert "run.json: 7 events could not be read and are left out" in trace.notes


@pytest.mark.parametrize(
    "meta",
    [
        slow_case({"deviceProperties": 3}),
        {
            "deviceProperties": [
                3,
                {},
                {"id": 0, "name": 4, "totalGlobalMem": "lots"},
                {"id": [], "totalGlobalMem": -5},
            ]
        },
        slow_case({"deviceProperties": [{"id": 0, "totalGlobalMem": 1e300}]}),
        slow_case({"distributedInfo": [], "host_name": {}}),
        {"distributedInfo": {"rank": 1.5, "world_size": "many", "backend": None}},
        slow_case({"baseTimeNanoseconds": "now"}),
        slow_case({"baseTimeNanoseconds": 10**30}),
    ],
)
def test_read_trace__ignores_invalid_metadata(
    tmp_path: Path, meta: dict[str, Any]
) -> None:
    trace = import_files(
        write_trace(
            tmp_path / "run.json", [*iteration(0, 0), *launched(11, 12, 13, 1)], **meta
        )
    )
    (device,) = trace.rank(0).devices
    assert device == DeviceInfo(device="cuda:0", kind="cuda")
    assert trace.rank(0).world_size is None
    assert len(trace.phases(0)) == 3


SMALL = [
    *iteration(0, 0), *launched(11, 12, 13, 1), *copied("HtoD (Pinned -> Device)", 45, 50, 7), memory_event(5, 10, 20),
    span("autograd::engine::evaluate_function: AddBackward0", 50, 60, "cpu_op", **{"Sequence number": 4}),
    span("nn.Module: Linear", 12, 20, "python_function"),
]  # fmt: skip


@settings(
    max_examples=examples(25, by_default=6),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_read_trace__raises_one_error_or_returns_a_trace_for_damaged_files(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = write_trace(
        tmp_path / "run.json",
        SMALL,
        deviceProperties=CARDS,
        distributedInfo={"rank": 1},
    )
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw)))
        length = data.draw(st.sampled_from([0, 1, 3, 30]))
        raw[position : position + length] = data.draw(
            st.binary(max_size=4)
            | st.sampled_from(
                [b"{", b"]", b'"', b"\\", b"1e300", b"-", b"null", b"99999999999"]
            )
        )
    path.write_bytes(raw)
    builder = TraceBuilder("imported")
    with contextlib.suppress(SourceError):
        read_trace(Source(path), builder, 0)
    trace = builder.build()
    for rank in trace.ranks:
        in_order(trace.phases(rank))
        for table in ("memory", "transfers"):
            trace.table(rank, table)
    json.dumps(trace.raw_meta)
