"""Reads a memory snapshot through a separate process, which a harmful file may crash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from ebbtide.profiler.memory_snapshot import sandboxed_unpickler

_CHUNK_BYTES = 1 << 20
_SECONDS = 20
# The year 2112.
_MAX_US = 1 << 52
_MAX_DEVICES = 1024
# No device has this many bytes, and no job allocates this many in sum.
_MAX_BYTES = 1 << 48
_MAX_SUM_BYTES = float(1 << 62)


class SnapshotError(ValueError):
    """A file is not a memory snapshot, or is damaged or harmful. The message is the reason."""


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot as tables of int64 columns, whose names are in `sandboxed_unpickler.TABLES`.

    Attributes:
        events: What the allocator did, in order; `stack` is a position in `stacks`, or -1.
        blocks: Its blocks at the end; `segment` is a row of `segments`.
        segments: Its segments at the end; `pool` is 1 in a private pool (of a CUDA graph).
        stacks: Call stacks, the outermost frame in the first line.
        annotations: (name, START or END, device, Unix time in us), in order.
    """

    events: pd.DataFrame
    blocks: pd.DataFrame
    segments: pd.DataFrame
    stacks: list[str]
    annotations: list[tuple[str, str, int, int]]


def read_snapshot(open_file: Callable[[], AbstractContextManager[IO[bytes]]], seconds: int = _SECONDS) -> Snapshot:
    """Read a snapshot.

    Args:
        open_file: Opens the unpacked file.
        seconds: CPU time allowed in addition to one second per MB.

    Raises:
        SnapshotError: The file is not a snapshot, has figures that no allocator has, or is harmful.
    """
    with tempfile.TemporaryFile() as answer:
        if _run_unpickler(open_file, answer, seconds):
            raise SnapshotError("opening it crashes, or takes too long")
        answer.seek(0)
        head: dict[str, Any] = json.loads(answer.readline())
        if "error" in head:
            raise SnapshotError(head["error"])
        tables = {
            table: pd.DataFrame({column: np.frombuffer(answer.read(8 * rows), np.int64) for column in columns})
            for (table, columns), rows in zip(sandboxed_unpickler.TABLES.items(), head["rows"].values(), strict=True)
        }
    _check_ranges(tables)
    return Snapshot(**tables, stacks=head["stacks"], annotations=[tuple(entry) for entry in head["annotations"]])


def _run_unpickler(open_file: Callable[[], AbstractContextManager[IO[bytes]]], answer: IO[bytes], seconds: int) -> int:
    """Run the unpickler on a snapshot, and return its exit code."""
    program = [sys.executable, "-I", "-S", str(Path(sandboxed_unpickler.__file__)), str(seconds)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        try:
            with open_file() as file, process.stdin as pipe:
                shutil.copyfileobj(file, pipe, _CHUNK_BYTES)
        except BrokenPipeError:
            # The process stops reading when it knows that the file is invalid. The answer has the reason.
            pass
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _check_ranges(tables: dict[str, pd.DataFrame]) -> None:
    """Raise SnapshotError for numbers that no allocator counts, so that no sum overflows."""
    limits = {"device": _MAX_DEVICES, "time_us": _MAX_US, "bytes": _MAX_BYTES, "requested": _MAX_BYTES}
    columns = [item for table in tables.values() if len(table) for item in table.items()]
    for column, values in columns:
        if column not in limits:
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limits[column]:
            raise SnapshotError(f"it has {low if low < 0 else high} for {column}")
        if limits[column] == _MAX_BYTES and values.astype(float).sum() >= _MAX_SUM_BYTES:
            raise SnapshotError("its sizes add up to more than any device has")
