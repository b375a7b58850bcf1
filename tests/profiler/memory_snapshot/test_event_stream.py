"""Events that are taken out of snapshots as they are read, compared with those that
pickle reads."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks.large_snapshot import write_snapshot
from ebbtide.profiler.memory_snapshot.reader import SnapshotError, read_snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS
from tests.conftest import slow_case

COLUMNS = ("action", "time_us", "bytes", "address")


def lines(frames: list[dict[str, Any]] | None) -> str:
    """Return the Python frames of a stack as a snapshot's text."""
    python = [frame for frame in frames or () if frame["filename"].endswith(".py")]
    return "\n".join(
        f"{frame['name']} ({frame['filename']}:{frame['line']})"
        for frame in reversed(python)
    )


def check(path: Path) -> None:
    """Compare the events and their stacks with those that pickle reads."""
    expected = pickle.loads(path.read_bytes())
    snapshot = read_snapshot(lambda: path.open("rb"))
    events = [
        (
            device,
            ACTIONS[event["action"]],
            event["time_us"],
            event["size"],
            event.get("addr", 0),
        )
        for device, trace in enumerate(expected["device_traces"])
        for event in trace
        if event["action"] in ACTIONS
    ]
    read = [
        (device, *row)
        for device, rows in snapshot.events.items()
        for block in rows.blocks(*ACTIONS)
        for row in block[[*COLUMNS]].tolist()
    ]
    assert read == events
    texts = [
        lines(e.get("frames"))
        for t in expected["device_traces"]
        for e in t
        if e["action"] in ACTIONS
    ]
    blocks = [
        block for rows in snapshot.events.values() for block in rows.blocks(*ACTIONS)
    ]
    stacks = [number for block in blocks for number in block["stack"].tolist()]
    assert [
        snapshot.stacks[number] if number >= 0 else "" for number in stacks
    ] == texts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


def test_write_snapshot__writes_the_bytes_of_pickle(path: Path) -> None:
    events = write_snapshot(path, 500_000)
    snapshot = pickle.loads(path.read_bytes())
    assert pickle.dumps(snapshot, 4) == path.read_bytes()
    assert len(snapshot["device_traces"][0]) == events
    check(path)


def events(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return events as torch makes them: some share a list of frames, all lists share
    the frames."""
    frames = [
        {"filename": f"/job/{n}.py", "name": f"f{n}", "line": n} for n in range(300)
    ]
    made, actions = [], [*ACTIONS]
    for number in range(count):
        stack = [frames[(number * step) % 300] for step in range(number % 7)]
        event = {
            "action": actions[number % 3],
            "addr": number * 512,
            "size": number % 70_000,
            "stream": 0,
        }
        event |= {"time_us": 1_750_000_000_000_000 + number, "frames": stack, **fields}
        made += [event, {**event, "action": "free_completed"}]
    return made


@pytest.mark.parametrize("protocol", [2, slow_case(3), 4, slow_case(5)])
def test_read_snapshot__reads_the_events_of_pickle(protocol: int, path: Path) -> None:
    first = events(3000)
    first[40:40] = [
        {"action": "oom", "device_free": 7, "size": 1 << 40, "stream": 0, "time_us": 5}
    ]
    first[90:90] = [{"action": "snapshot", "size": -3}]
    second = [
        dict(event, compile_context=("N/A " + str(n % 2))[:-1])
        for n, event in enumerate(events(2000))
    ]
    # Long texts are outside of the frames of a pickle.
    traces = [
        first,
        [],
        second,
        events(5, user_metadata=""),
        events(3, user_metadata="x" * 70_000),
    ]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": traces}, protocol))
    check(path)


def test_read_snapshot__refuses_an_event_of_two_lists(path: Path) -> None:
    trace = events(2000)
    path.write_bytes(
        pickle.dumps({"segments": [], "device_traces": [trace, [trace[900]]]})
    )
    with pytest.raises(SnapshotError, match="the same event twice"):
        read_snapshot(lambda: path.open("rb"))


def test_read_snapshot__refuses_a_list_of_two_devices(path: Path) -> None:
    trace = events(2)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace, trace]}))
    with pytest.raises(SnapshotError, match="the same list of events"):
        read_snapshot(lambda: path.open("rb"))
