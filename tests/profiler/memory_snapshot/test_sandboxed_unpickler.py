"""Pickles that were made to harm the process that opens them."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.memory_snapshot.reader import (
    Snapshot,
    SnapshotError,
    read_snapshot,
)
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS, EVENT_COLUMNS
from tests.conftest import run_process, slow, slow_case

EVENT = {
    "action": "alloc",
    "addr": 1,
    "size": 512,
    "stream": 0,
    "time_us": 1_700_000_000_000_000,
}


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
    """Return a dict whose key is deeply nested tuples, which are hashed level by
    level."""
    return b"\x80\x04})" + step * levels + b"K\x00s."


def repeated_traces() -> bytes:
    """Return a small file of 10**10 events: one list of events, repeated by
    reference."""
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
    "too large a number": pickle.dumps(
        {"segments": [], "device_traces": [[{**EVENT, "size": 1 << 80}]]}
    ),
    "text for a number": pickle.dumps(
        {"segments": [], "device_traces": [[{**EVENT, "size": "512"}]]}
    ),
    "packed zeros": gzip.compress(b"\x80\x04") + 100 * gzip.compress(bytes(1_000_000)),
    "damaged gzip": gzip.compress(pickle.dumps([EVENT] * 1000))[:-20],
}


# One of each kind: a size that is not there, deep nesting, no end, damage, other
# content.
TELLING = (
    "bytes",
    "deep key",
    "events without end",
    "cyclic",
    "cut off",
    "numbers as events",
    "packed zeros",
)


def read(path: Path, seconds: int = 20) -> Snapshot:
    return read_snapshot(Source(path).open, seconds)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


@pytest.mark.parametrize("name", slow(HOSTILE, but=TELLING))
def test_read_snapshot__raises_one_error_for_a_harmful_pickle(
    name: str, source: Path
) -> None:
    source.write_bytes(HOSTILE[name])
    with pytest.raises((SnapshotError, SourceError)) as refusal:
        read(source, seconds=1)
    assert str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "names",
    [TELLING, pytest.param([*HOSTILE], marks=pytest.mark.slow)],
    ids=["telling", "all"],
)
def test_read_snapshot__harmful_pickles_cost_little_memory(
    names: Sequence[str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / f"{name}.pickle").write_bytes(HOSTILE[name])
    script = """if True:
        import resource, sys
        from pathlib import Path
        from ebbtide.features.importers.source import Source, SourceError
        from ebbtide.profiler.memory_snapshot.reader import SnapshotError, read_snapshot
        from tests.process_sizes import process_bytes
        for path in Path(sys.argv[1]).iterdir():
            try:
                read_snapshot(Source(path).open, seconds=1)
            except (SnapshotError, SourceError):
                continue
        print(process_bytes("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
    """
    run = run_process([sys.executable, "-c", script, tmp_path])
    assert run.returncode == 0, run.stderr
    assert max(map(int, run.stdout.split())) < 512 << 20


def test_read_snapshot__runs_nothing_from_the_file(
    tmp_path: Path, source: Path
) -> None:
    mark = tmp_path / "mark"
    source.write_bytes(pickle.dumps({"segments": [Caller(mark)]}))
    with pytest.raises(
        SnapshotError, match=r"it asks to run posix\.system, which was refused"
    ):
        read(source)
    assert not mark.exists()


def test_read_snapshot__removes_control_characters_from_errors(source: Path) -> None:
    source.write_bytes(b"\x80\x04\x8c\x04\x1b[2J\x8c\x01x\x93.")
    with pytest.raises(
        SnapshotError, match=r"it asks to run \?\[2J\.x, which was refused"
    ):
        read(source)


def test_read_snapshot__refuses_objects_outside_the_file(source: Path) -> None:
    with source.open("wb") as file:
        Elsewhere(file).dump({"segments": ["outside"]})
    with pytest.raises(SnapshotError, match="outside the file, which was refused"):
        read(source)


@pytest.mark.parametrize("devices", [1, 2])
def test_read_snapshot__refuses_times_of_some_events_alone(
    devices: int, source: Path
) -> None:
    event = {key: value for key, value in EVENT.items() if key != "time_us"}
    traces = [[event, EVENT]] if devices == 1 else [[event], [EVENT]]
    source.write_bytes(pickle.dumps({"segments": [], "device_traces": traces}))
    with pytest.raises(
        SnapshotError, match=r"some of its events have no times|-1 for time_us"
    ):
        read(source)


@pytest.mark.parametrize("protocol", [2, slow_case(3), slow_case(4), 5])
def test_read_snapshot__reads_plain_data(protocol: int, source: Path) -> None:
    block = {"size": 1024, "state": "active_allocated"}
    blocks = [
        {**block, "requested_size": 700},
        {**block, "history": [{"real_size": 600}]},
        block,
    ]
    segment = {"device": 1, "address": 0, "total_size": 4096, "blocks": blocks}
    unknown = {"action": "user_defined", "size": 0}
    source.write_bytes(
        pickle.dumps(
            {"segments": [segment], "device_traces": [[EVENT, unknown], []]}, protocol
        )
    )
    snapshot = read(source)
    first = {
        device: next(events.blocks(*ACTIONS))[0]
        for device, events in snapshot.events.items()
    }
    assert {
        device: [int(event[name]) for name in EVENT_COLUMNS]
        for device, event in first.items()
    } == {0: [0, EVENT["time_us"], 512, 1, -1]}
    assert snapshot.segments.to_dict("records") == [
        {"device": 1, "bytes": 4096, "pool": 0}
    ]
    assert snapshot.blocks["requested"].tolist() == [700, 600, 1024]
    assert snapshot.blocks["address"].tolist() == [0, 1024, 2048]


def frame(name: str, file: str = "/job/train.py", line: int = 1) -> dict[str, object]:
    return {"name": name, "filename": file, "line": line}


def test_read_snapshot__keeps_the_python_frames_of_stacks_and_each_stack_once(
    source: Path,
) -> None:
    native = frame("at::empty_cuda", "??", 0), frame("_PyEval_EvalFrameDefault", "", 0)
    stack = [native[0], frame("step"), native[1], frame("main", line=7)]
    node = frame(
        "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>)",
        "",
        0,
    )
    engine = frame(
        "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask>)",
        "",
        0,
    )
    workspace = frame("at::cuda::getNewWorkspace()", "", 0)
    stacks = [
        stack,
        [*stack],
        [native[0], node, engine],
        [frame("recompute"), node, engine],
        [],
        [*native],
    ]
    stacks += [[workspace, node, engine]]
    events = [{**EVENT, "frames": frames} for frames in stacks]
    source.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    snapshot = read(source)
    assert snapshot.stacks == [
        "main (/job/train.py:7)\nstep (/job/train.py:1)",
        "autograd engine\nMulBackward0",
        "autograd engine\nMulBackward0\nrecompute (/job/train.py:1)",
        "autograd engine\nMulBackward0\ncuBLAS workspace",
    ]
    assert next(snapshot.events[0].blocks(*ACTIONS))["stack"].tolist() == [
        0,
        0,
        1,
        2,
        -1,
        -1,
        3,
    ]


def test_read_snapshot__removes_control_characters_from_stacks(source: Path) -> None:
    event = {**EVENT, "frames": [frame("\x1b[2J\n" + "x" * 1000)]}
    source.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}))
    (stack,) = read(source).stacks
    assert stack == "?[2J?" + "x" * 295


@pytest.mark.parametrize("size", [-1, 1 << 48])
def test_read_snapshot__refuses_sizes_that_no_device_has(
    size: int, source: Path
) -> None:
    source.write_bytes(
        pickle.dumps({"segments": [], "device_traces": [[{**EVENT, "size": size}]]})
    )
    with pytest.raises(SnapshotError, match=f"it has {size} for bytes"):
        read(source)
