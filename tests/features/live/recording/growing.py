"""Recordings whose spools grow piece by piece, as those of running jobs do."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import RECORD
from ebbtide.profiler.trace.files import write_meta

MS = 1_000_000
CAPACITY = 1 << 34
PEAK = 25e9
# An iteration by the host's clock; the device is behind by 1 ms.
FORWARD_MS, BACKWARD_MS, UPDATE_MS, OTHER_MS = 10, 20, 5, 5
_DEVICE, _ALLOCATED = (kinds.POOLS.index(pool) for pool in ("device", "allocated"))


@dataclass
class GrowingRecording:
    """A recording of ranks on one GPU each.

    Attributes:
        path: The trace.
        spools: Spool -> its whole content, of which `grow` writes a part.
    """

    path: Path
    spools: dict[Path, bytes] = field(default_factory=dict)

    def begin(self) -> None:
        """Create the folder, with meta.json."""
        (self.path / "spool").mkdir(parents=True)
        gpus = [
            {
                "device": f"cuda:{index}",
                "kind": "cuda",
                "uuid": f"GPU-{index}",
                "index": index,
                "capacity_bytes": CAPACITY,
                "link": {"peak_bytes_per_s": PEAK},
            }
            for index in range(2)
        ]
        host = {
            "name": socket.gethostname(),
            "cpu": {"device": "cpu", "kind": "cpu"},
            "gpus": gpus,
        }
        meta: dict[str, Any] = {
            "state": "recording",
            "source": "recorded",
            "started_ns": 0,
            "host": host,
        }
        # Its times count from now on: the processes are not silent.
        meta["clock"] = {
            "name": "monotonic",
            "host": host["name"],
            "wall_offset_ns": time.time_ns(),
        }
        write_meta(
            self.path,
            {**meta, "command": ["python", "train.py"], "ranks": [], "notes": []},
        )

    def add_rank(
        self, rank: int, iterations: int, slow_ms: int = 0, world_size: int = 2
    ) -> Path:
        """Add the spool of a rank; every seventh iteration takes `slow_ms` longer.
        Nothing is written yet."""
        name = f"here-{os.getpid()}.{rank:x}"
        job_info = {
            "host": socket.gethostname(),
            "devices": [
                {
                    "device": "cuda:0",
                    "kind": "cuda",
                    "uuid": f"GPU-{rank}",
                    "capacity_bytes": CAPACITY,
                    "name": "G",
                }
            ],
            "launch": "one",
        }
        (self.path / "spool" / f"facts-{name}.json").write_text(json.dumps(job_info))
        records = [_header(rank, world_size), _record(kinds.START, x=0)]
        now, sequence = 0, 0
        for iteration in range(iterations):
            length = {0: FORWARD_MS, 1: BACKWARD_MS, 2: UPDATE_MS}
            for code, length_ms in length.items():
                extra = slow_ms if code == 2 and iteration % 7 == 6 else 0
                start, end = now, now + (length_ms + extra) * MS
                sequence += 1
                used = (code + 1) * 1000 + iteration + 100 * rank
                records += [
                    _record(kinds.MEMORY, _ALLOCATED, a=0, x=start + MS, y=used),
                    _record(kinds.PHASE, code, a=sequence, x=start, y=end),
                    _record(kinds.MEMORY, _ALLOCATED, a=0, x=end, y=used - 10),
                ]
                now = end
                if sequence > 1:
                    # The device's times arrive one phase late.
                    records.append(self._device_times(records, sequence - 1))
            records.append(_record(kinds.ITERATION, a=iteration, b=sequence, x=now))
            now += OTHER_MS * MS
        records.append(self._device_times(records, sequence))
        records.append(
            _record(kinds.STOPPED, kinds.STOP_REASONS.index("closed"), x=now)
        )
        path = self.path / "spool" / f"agent-{name}.spool"
        self.spools[path] = b"".join(records)
        return path

    @staticmethod
    def _device_times(records: list[bytes], sequence: int) -> bytes:
        phase = next(
            fields
            for raw in reversed(records)
            if (fields := RECORD.unpack(raw))[0] == kinds.PHASE
            and fields[3] == sequence
        )
        return _record(kinds.GPU_TIMES, a=sequence, x=phase[7] + MS, y=phase[8] + MS)

    def add_sampler(self, end_ms: int) -> Path:
        """Add the spool of the sampler: memory, link and utilization of two cards every
        10 ms."""
        records = [_header(0, 1)]
        for time_ms in range(10, end_ms, 10):
            for card in range(2):
                rate = int(1e9 * (1 + time_ms % 3))
                records += [
                    _record(
                        kinds.MEMORY,
                        _DEVICE,
                        card,
                        x=time_ms * MS,
                        y=(5 << 30) + time_ms,
                    ),
                    _record(
                        kinds.LINK,
                        0,
                        card,
                        a=4,
                        b=16,
                        w=10 * MS,
                        x=time_ms * MS,
                        y=rate,
                        z=2 * rate,
                    ),
                    _record(kinds.GPU_STATE, 0, card, x=time_ms * MS, y=time_ms % 101),
                ]
        path = self.path / "spool" / f"sampler-here-{os.getpid()}.ff.spool"
        self.spools[path] = b"".join(records)
        return path

    def grow(self, path: Path, size: int) -> None:
        """Append to a spool until it has `size` bytes of its content."""
        written = path.stat().st_size if path.exists() else 0
        with open(path, "ab") as file:
            file.write(self.spools[path][written:size])

    def grow_to(self, share: float) -> None:
        """Append to all spools until they have this share of their content."""
        for path, content in self.spools.items():
            self.grow(path, round(share * len(content)))


def _record(kind: int, code: int = 0, small: int = 0, **fields: int) -> bytes:
    return RECORD.pack(kind, code, small, *(fields.get(name, 0) for name in "abcwxyz"))


def _header(rank: int, world_size: int) -> bytes:
    magic = int.from_bytes(kinds.MAGIC, "little")
    return RECORD.pack(
        kinds.HEADER, kinds.VERSION, 0, os.getpid(), rank, world_size, magic, 0, 0, rank
    )
