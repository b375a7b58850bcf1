"""Measure the memory and time in which ebbtide imports a large memory snapshot and says
what its peak consists of.

    python benchmarks/large_snapshot.py [--gb 1 4] [--folder FOLDER]

The snapshot is written to FOLDER (the default is that of temporary files) as torch's
Python writer does, which takes two minutes per GB. Of each command: wall and CPU
seconds, and the most resident memory of all its processes together, read every 20 ms
(memory that they share counts in each). Prints Markdown.

The file has the proportions of a recorded training step: three events per block
(allocation, release requested and completed), stacks of 30 to 80 frames with those of
C++, a list of frames for each allocation and each release, which share the dicts of
frames, and one segment per 20 blocks. `pickle.dumps(pickle.loads(file), 4)` are the
same bytes (a test compares them).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]

_FRAME_BYTES = 1 << 16
_BATCH = 1000
_STACKS, _FRAMES = 400, 1500
_BLOCKS_PER_STEP = 2000
_ADDRESS = 0x7F0000000000
_START_US = 1_750_000_000_000_000


class Writer:
    """Writes the opcodes of `pickle.dump(..., protocol=4)` for objects whose sharing is
    that of torch's snapshots."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame = bytearray()
        self._memo: dict[object, int] = {}
        self._size = 0
        file.write(b"\x80\x04")

    @property
    def written_bytes(self) -> int:
        return self._file.tell()

    def put(self, key: object = None) -> bytes:
        """Return the opcode that memoizes an object, which `reference(key)` gets
        later."""
        if key is not None:
            self._memo[key] = self._size
        self._size += 1
        return b"\x94"

    def reference(self, key: object) -> bytes | None:
        index = self._memo.get(key)
        if index is None:
            return None
        return (
            b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")
        )

    def text(self, text: str) -> bytes:
        data = text.encode()
        return self.reference(text) or b"\x8c" + bytes([len(data)]) + data + self.put(
            text
        )

    def value(self, data: bytes) -> None:
        """Add the opcodes of a value, or those that begin it. A frame of 64 KiB may end
        before a value."""
        if len(self._frame) >= _FRAME_BYTES:
            self.end_frame()
        self._frame += data

    def end(self, data: bytes) -> None:
        """Add the opcode that ends a container."""
        self._frame += data

    def end_frame(self) -> None:
        self._file.write(b"\x95" + len(self._frame).to_bytes(8, "little"))
        self._file.write(self._frame)
        self._frame.clear()

    def items(self, values: Iterator[Any], save: Any) -> None:
        """Add a list."""
        self.value(b"]" + self.put())
        batch: list[Any] = []
        for value in values:
            batch.append(value)
            if len(batch) == _BATCH:
                self._batch(batch, save)
                batch.clear()
        self._batch(batch, save)

    def _batch(self, batch: list[Any], save: Any) -> None:
        if len(batch) > 1:
            self._frame += b"("
        for value in batch:
            save(value)
        if batch:
            self._frame += b"e" if len(batch) > 1 else b"a"

    def mapping(self, pairs: dict[str, Any]) -> None:
        """Add a dict with at least two keys whose values are numbers, text, or
        functions that add the value."""
        self.value(b"}" + self.put() + b"(")
        for key, value in pairs.items():
            self.value(self.text(key))
            if callable(value):
                value()
            else:
                self.value(
                    self.text(value) if isinstance(value, str) else integer(value)
                )
        self.end(b"u")


def integer(value: int) -> bytes:
    """Return the opcode of a number that is not negative."""
    if value < 256:
        return b"K" + bytes([value])
    if value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def write_snapshot(path: Path, size_bytes: int) -> int:
    """Write a snapshot of about a size, and return its number of events."""
    with path.open("wb") as file:
        writer = Writer(file)
        snapshot = _Snapshot(writer, size_bytes)
        writer.mapping(
            {"segments": snapshot.add_segments, "device_traces": snapshot.add_traces}
        )
        writer.end(b".")
        writer.end_frame()
    return snapshot.events


class _Snapshot:
    """Events of training steps: allocations, then their releases in the other order."""

    def __init__(self, writer: Writer, size_bytes: int) -> None:
        self._writer = writer
        self._size_bytes = size_bytes
        self._random = random.Random(0)
        self._stacks = [
            [
                f"f{self._random.randrange(_FRAMES)}"
                for _ in range(self._random.randint(30, 80))
            ]
            for _ in range(_STACKS)
        ]
        self._lists = 0
        self.events = 0

    def add_segments(self) -> None:
        self._writer.items(iter(range(_BLOCKS_PER_STEP // 20)), self._add_segment)

    def _add_segment(self, number: int) -> None:
        def add_blocks() -> None:
            address = _ADDRESS + (number << 26)
            block = {
                "address": address,
                "size": 1 << 26,
                "requested_size": 1 << 26,
                "state": "inactive",
            }
            self._writer.items(iter([block]), self._writer.mapping)

        segment = {
            "device": 0,
            "address": _ADDRESS + (number << 26),
            "total_size": 1 << 26,
            "stream": 0,
        }
        self._writer.mapping({**segment, "segment_type": "large", "blocks": add_blocks})

    def add_traces(self) -> None:
        self._writer.items(
            iter([self._event_rows()]),
            lambda rows: self._writer.items(rows, self._add_event),
        )

    def _event_rows(self) -> Iterator[tuple[str, int, int, int, int, str]]:
        """Yield (action, address, size, stack, time in us, name of the list) until the
        file is large enough."""
        time_us = _START_US
        sizes = [
            self._random.randrange(512, 1 << 21, 512) for _ in range(_BLOCKS_PER_STEP)
        ]
        for number in range(_BLOCKS_PER_STEP // 20):
            yield (
                "segment_alloc",
                _ADDRESS + (number << 26),
                1 << 26,
                number % _STACKS,
                time_us,
                f"s{number}",
            )
        while self._writer.written_bytes < self._size_bytes:
            order = [*range(_BLOCKS_PER_STEP)]
            for block in order:
                time_us += 7
                self._lists += 1
                address = _ADDRESS + (block << 22)
                yield (
                    "alloc",
                    address,
                    sizes[block],
                    block % _STACKS,
                    time_us,
                    f"l{self._lists}",
                )
            for block in reversed(order):
                time_us += 9
                self._lists += 1
                row = _ADDRESS + (block << 22), sizes[block], (block * 7) % _STACKS
                yield "free_requested", *row, time_us, f"l{self._lists}"
                yield "free_completed", *row, time_us + 1, f"l{self._lists}"

    def _add_event(self, row: tuple[str, int, int, int, int, str]) -> None:
        action, address, size, stack, time_us, frames = row
        self.events += 1
        event = {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "time_us": time_us,
        }
        self._writer.mapping(
            {**event, "frames": lambda: self._add_frames(frames, self._stacks[stack])}
        )

    def _add_frames(self, name: str, frames: list[str]) -> None:
        writer = self._writer
        reference = writer.reference(name)
        if reference is not None:
            writer.value(reference)
            # Torch's list is in two events: it is not needed again.
            del writer._memo[name]
            return
        writer.value(b"]" + writer.put(name) + b"(")
        for frame in frames:
            self._add_frame(frame)
        writer.end(b"e")

    def _add_frame(self, name: str) -> None:
        writer, key = self._writer, ("frame", name)
        reference = writer.reference(key)
        if reference is not None:
            writer.value(reference)
            return
        number = int(name[1:])
        python = number % 3 == 0
        file = f"/job/module_{number}.py" if python else "??"
        writer.value(b"}" + writer.put(key) + b"(")
        for field, value in (
            ("filename", file),
            ("line", number),
            ("name", f"call_{number}"),
        ):
            writer.value(writer.text(field))
            writer.value(
                integer(value) if isinstance(value, int) else writer.text(value)
            )
        writer.end(b"u")


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process and of those that it started; 0 of one
    that has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(
        resident_bytes(int(child)) for child in children
    )


def cost(*arguments: object) -> tuple[str, str, str]:
    """Run a command of ebbtide; return its wall s, CPU s and peak GB."""
    before, begin, peak = os.times(), time.perf_counter(), 0
    command = [sys.executable, "-m", "ebbtide", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    after = os.times()
    cpu_s = (
        after.children_user
        + after.children_system
        - before.children_user
        - before.children_system
    )
    return f"{time.perf_counter() - begin:.0f}", f"{cpu_s:.0f}", f"{peak / 1e9:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gb", type=float, nargs="+", default=[1.0], help="Sizes of snapshots in GB"
    )
    parser.add_argument("--folder", help="Folder for the snapshots and traces")
    options = parser.parse_args()
    from tables import machine_line, table

    print(machine_line())
    rows = []
    for size in options.gb:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            snapshot, trace = Path(folder) / "snapshot.pickle", Path(folder) / "run.ebb"
            events = f"{write_snapshot(snapshot, int(size * 1e9)):,}"
            rows.append(
                (
                    f"{size:g} GB",
                    events,
                    "import",
                    *cost("import", snapshot, "-o", trace),
                )
            )
            rows.append(
                (
                    f"{size:g} GB",
                    events,
                    "memory --at peak",
                    *cost("memory", trace, "--at", "peak"),
                )
            )
    table(("snapshot", "events", "command", "wall s", "CPU s", "peak GB"), rows)


if __name__ == "__main__":
    main()
