"""The numbers of a memory snapshot, by way of a process that may come to harm (see plain_pickle)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.source import Source
from ebbtide.profiler.importers.torch_memory import sandboxed_unpickler as plain_pickle

_CHUNK = 1 << 20
_SECONDS = 20


def read_tables(source: Source, seconds: int = _SECONDS) -> dict[str, pd.DataFrame]:
    """The tables of plain_pickle.TABLES, int64 columns: what the allocator did, and its blocks and segments at the end.

    seconds: how much CPU time it may take beside a second per MB. Raises SourceError for what is no snapshot, or a
    harmful one.
    """
    with tempfile.TemporaryFile() as answer:
        if _open(source, answer, seconds):
            raise source.damaged("opening it crashes, or takes too long")
        answer.seek(0)
        head: dict[str, Any] = json.loads(answer.readline())
        if "error" in head:
            raise source.damaged(head["error"])
        return {
            table: pd.DataFrame({column: np.frombuffer(answer.read(8 * rows), np.int64) for column in columns})
            for (table, columns), rows in zip(plain_pickle.TABLES.items(), head["rows"].values(), strict=True)
        }


def _open(source: Source, answer: IO[bytes], seconds: int) -> int:
    """Have the snapshot opened; returns the exit code."""
    program = [sys.executable, "-I", "-S", str(Path(plain_pickle.__file__)), str(seconds)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        try:
            with source.open() as file, process.stdin as pipe:
                shutil.copyfileobj(file, pipe, _CHUNK)
        except BrokenPipeError:
            # It has seen enough, and says so.
            pass
        except BaseException:
            process.kill()
            raise
    return process.returncode
