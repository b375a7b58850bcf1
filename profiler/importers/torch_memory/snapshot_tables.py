"""Reads the numbers of a memory snapshot through a separate process, which a harmful file may crash."""

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
from ebbtide.profiler.importers.torch_memory import sandboxed_unpickler

_CHUNK_BYTES = 1 << 20
_SECONDS = 20


def read_tables(source: Source, seconds: int = _SECONDS) -> dict[str, pd.DataFrame]:
    """Read what the allocator did, and its blocks and segments at the end.

    Args:
        source: The snapshot.
        seconds: CPU time allowed in addition to one second per MB.

    Returns:
        The tables of `sandboxed_unpickler.TABLES` with int64 columns.

    Raises:
        SourceError: The file is not a snapshot, or is harmful.
    """
    with tempfile.TemporaryFile() as answer:
        if _run_unpickler(source, answer, seconds):
            raise source.damaged("opening it crashes, or takes too long")
        answer.seek(0)
        head: dict[str, Any] = json.loads(answer.readline())
        if "error" in head:
            raise source.damaged(head["error"])
        return {
            table: pd.DataFrame({column: np.frombuffer(answer.read(8 * rows), np.int64) for column in columns})
            for (table, columns), rows in zip(sandboxed_unpickler.TABLES.items(), head["rows"].values(), strict=True)
        }


def _run_unpickler(source: Source, answer: IO[bytes], seconds: int) -> int:
    """Run the unpickler on a snapshot, and return its exit code."""
    program = [sys.executable, "-I", "-S", str(Path(sandboxed_unpickler.__file__)), str(seconds)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        try:
            with source.open() as file, process.stdin as pipe:
                shutil.copyfileobj(file, pipe, _CHUNK_BYTES)
        except BrokenPipeError:
            # The process stops reading when it knows that the file is invalid. The answer has the reason.
            pass
        except BaseException:
            process.kill()
            raise
    return process.returncode
