"""Files of one trace must share their time, unless the user aligns them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.errors import TraceError
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from ebbtide.profiler.trace import TraceBuilder, open_trace
from ebbtide.profiler.trace.merge import merge

START = 1_713_142_360 * 10**9
HOUR = 3600 * 10**9
MS = 10**6


def kineto(path: Path, begin_ns: int) -> Path:
    """Write a torch.profiler trace of 10 ms with one iteration and one copy."""
    marks = [
        ("ProfilerStep#3", 0, 10_000),
        ("forward", 1000, 3000),
        ("backward", 3000, 7000),
        ("optimizer", 7000, 9000),
    ]
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": name,
            "ts": ts,
            "dur": end - ts,
            "args": {},
        }
        for name, ts, end in marks
    ]
    copy = {"device": 0, "stream": 7, "bytes": 64, "correlation": 5}
    events.append(
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD (Pinned -> Device)",
            "ts": 2000,
            "dur": 5,
            "args": copy,
        }
    )
    path.write_text(
        json.dumps(
            {"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": begin_ns}
        )
    )
    return path


def monitor(path: Path, begin_ns: int) -> Path:
    rows = "".join(
        f"{begin_ns + n * MS},0,{n * 10**9},{(80 - n) * 10**9},{n},0\n"
        for n in range(9)
    )
    path.write_text(
        "timestamp,gpu,mem_used,mem_free,rxpci [MiB/s],txpci [MiB/s]\n" + rows
    )
    return path


def test_import_trace__refuses_files_without_common_time(tmp_path: Path) -> None:
    files = [
        kineto(tmp_path / "a.json", START),
        monitor(tmp_path / "m.csv", START + HOUR),
    ]
    with pytest.raises(
        SourceError, match=r"m\.csv begins .* after .*a\.json has ended.*--align start"
    ) as error:
        import_trace(files, tmp_path / "run.ebb")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run.ebb").exists()
    import_trace(
        [files[0], monitor(tmp_path / "n.csv", START + 5 * MS)], tmp_path / "run.ebb"
    )


def test_import_trace__refuses_ranks_without_common_time(tmp_path: Path) -> None:
    files = [
        kineto(tmp_path / f"rank{number}.json", START + number * HOUR)
        for number in (0, 1)
    ]
    with pytest.raises(SourceError, match="share no time"):
        import_trace(files, tmp_path / "run.ebb")


def test_import_trace__moves_files_to_the_beginning_of_another(tmp_path: Path) -> None:
    files = [
        kineto(tmp_path / "a.json", START),
        monitor(tmp_path / "m.csv", START + HOUR),
    ]
    for align, begin in (("start", START), (str(files[1]), START + HOUR)):
        trace = import_trace(files, tmp_path / "run.ebb", force=True, align=align)
        phases, memory, link = trace.phases(0), trace.memory(0), trace.link(0)
        assert (memory["t_ns"].min(), link["t_ns"].min()) == (begin, begin)
        # The file begins with the mark of its iteration.
        assert trace.rank(0).first_iteration_start_ns == begin
        assert phases["start_ns"].min() == begin + MS
        assert trace.transfers(0)["start_ns"].item() == begin + 2 * MS
        assert link["window_ns"].unique().tolist() == [20 * MS]
        assert any("were moved" in note for note in trace.notes)
    with pytest.raises(SourceError, match="name one of the files"):
        import_trace(files, tmp_path / "other.ebb", align="nowhere.csv")


def host(path: Path, rank: int, begin_ns: int) -> Path:
    builder = TraceBuilder(
        "recorded",
        clock={"name": "monotonic", "host": path.name, "wall_offset_ns": 100},
    )
    builder.rank(rank, devices=[]).phase("forward", begin_ns, begin_ns + MS, 0)
    builder.write(path)
    return path


def test_merge__refuses_traces_without_common_time_unless_aligned(
    tmp_path: Path,
) -> None:
    traces = [open_trace(host(tmp_path / f"{n}.ebb", n, n * HOUR)) for n in (0, 1)]
    with pytest.raises(
        TraceError, match=r"1\.ebb begins .* after .*0\.ebb has ended.*--align start"
    ):
        merge(traces, tmp_path / "all.ebb")
    merged = merge(traces, tmp_path / "all.ebb", align="start")
    assert [merged.phases(rank)["start_ns"].item() for rank in (0, 1)] == [0, 0]
    merged = merge(
        traces, tmp_path / "all.ebb", force=True, align=str(tmp_path / "1.ebb")
    )
    assert [merged.phases(rank)["start_ns"].item() for rank in (0, 1)] == [HOUR, HOUR]
    with pytest.raises(TraceError, match="name one of the traces"):
        merge(traces, tmp_path / "other.ebb", align="nowhere.ebb")
