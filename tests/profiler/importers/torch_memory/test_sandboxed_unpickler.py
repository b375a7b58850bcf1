"""Pickles that were made to harm the process that opens them."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
from pathlib import Path

import pytest

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory.snapshot_tables import read_tables
from tests.conftest import run_process

EVENT = {"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 1_700_000_000_000_000}


class Caller:
    """Object whose pickle asks for a shell command that creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, (f"touch {self.mark}",)


class Elsewhere(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return "there" if value == "outside" else None


def nested(levels: int, step: bytes) -> bytes:
    """Return a dict whose key is deeply nested tuples, which are hashed level by level."""
    return b"\x80\x04})" + step * levels + b"K\x00s."


def repeated_traces() -> bytes:
    """Return a small file of 10**10 events: one list of events, repeated by reference."""
    trace = [EVENT] * 100_000
    return pickle.dumps({"segments": [], "device_traces": [trace] * 100_000}, 4)


def cyclic() -> bytes:
    trace: list[object] = []
    trace.append(trace)
    return pickle.dumps({"segments": trace, "device_traces": [trace]})


HOSTILE = {
    "memo index": b"\x80\x04N" + b"r" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 61) + b"abc.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"abc.",
    "integer": b"\x80\x04\x8b" + struct.pack("<i", 0x7FFFFFFF) + b"abc.",
    "negative length": b"\x80\x04\x8b" + struct.pack("<i", -5) + b"abc.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "extension": b"\x80\x04\x82\x01.",
    "long extension": b"\x80\x04\x84\xff\xff\xff\x7f.",
    "many sets": b"\x80\x04(" + b"\x8f" * 3_000_000 + b"l.",
    "deep lists": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "deep key": nested(1_000_000, b"\x85"),
    "doubling key": nested(200, b"2\x86"),
    "events without end": repeated_traces(),
    "cyclic": cyclic(),
    "cut off": pickle.dumps({"segments": [], "device_traces": [[EVENT]]})[:-9],
    "another protocol": b"\x80\xff.",
    "nothing": b"\x80\x04.",
    "no snapshot": pickle.dumps({"loss": [1.0, 2.0]}),
    "a number": pickle.dumps(7),
    "numbers as events": pickle.dumps({"segments": [], "device_traces": [[1, 2]]}),
    "too large a number": pickle.dumps({"segments": [], "device_traces": [[{**EVENT, "size": 1 << 80}]]}),
    "text for a number": pickle.dumps({"segments": [], "device_traces": [[{**EVENT, "size": "512"}]]}),
    "packed zeros": gzip.compress(b"\x80\x04" + bytes(100_000_000)),
    "damaged gzip": gzip.compress(pickle.dumps([EVENT] * 1000))[:-20],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


@pytest.mark.parametrize("name", HOSTILE)
def test_read_tables__raises_one_error_for_a_harmful_pickle(name: str, source: Path) -> None:
    source.write_bytes(HOSTILE[name])
    with pytest.raises(SourceError) as refusal:
        read_tables(Source(source), seconds=1)
    assert str(source) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_read_tables__harmful_pickles_cost_little_memory(tmp_path: Path) -> None:
    for number, data in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.pickle").write_bytes(data)
    script = """if True:
        import resource, sys
        from pathlib import Path
        from ebbtide.profiler.importers.torch_memory.snapshot_tables import read_tables
        from ebbtide.profiler.importers.source import Source, SourceError
        for path in Path(sys.argv[1]).iterdir():
            try:
                read_tables(Source(path), seconds=1)
            except SourceError:
                continue
        # Its own ru_maxrss is that of whoever started it, where that was larger.
        own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1]
        print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    """
    run = run_process([sys.executable, "-c", script, tmp_path])
    assert run.returncode == 0, run.stderr
    assert max(map(int, run.stdout.split())) << 10 < 512 << 20


def test_read_tables__runs_nothing_from_the_file(tmp_path: Path, source: Path) -> None:
    mark = tmp_path / "mark"
    source.write_bytes(pickle.dumps({"segments": [Caller(mark)]}))
    with pytest.raises(SourceError, match=r"it asks to run posix\.system, which was refused"):
        read_tables(Source(source))
    assert not mark.exists()


def test_read_tables__removes_control_characters_from_errors(source: Path) -> None:
    source.write_bytes(b"\x80\x04\x8c\x04\x1b[2J\x8c\x01x\x93.")
    with pytest.raises(SourceError, match=r"it asks to run \?\[2J\.x, which was refused"):
        read_tables(Source(source))


def test_read_tables__refuses_objects_outside_the_file(source: Path) -> None:
    with source.open("wb") as file:
        Elsewhere(file).dump({"segments": ["outside"]})
    with pytest.raises(SourceError, match="outside the file, which was refused"):
        read_tables(Source(source))


def test_read_tables__gives_the_reason_for_events_without_times(source: Path) -> None:
    event = {key: value for key, value in EVENT.items() if key != "time_us"}
    source.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}))
    with pytest.raises(SourceError, match="no times"):
        read_tables(Source(source))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_read_tables__reads_plain_data(protocol: int, source: Path) -> None:
    block = {"size": 1024, "state": "active_allocated"}
    blocks = [{**block, "requested_size": 700}, {**block, "history": [{"real_size": 600}]}, block]
    segment = {"device": 1, "address": 0, "total_size": 4096, "blocks": blocks}
    unknown = {"action": "user_defined", "size": 0}
    source.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[EVENT, unknown], []]}, protocol))
    tables = read_tables(Source(source))
    assert tables["events"].to_dict("records") == [
        {"device": 0, "action": 0, "time_us": EVENT["time_us"], "bytes": EVENT["size"]}
    ]
    assert tables["segments"].to_dict("records") == [{"device": 1, "bytes": 4096}]
    assert tables["blocks"]["requested"].tolist() == [700, 600, 1024]
