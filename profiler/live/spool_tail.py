"""Reads what a growing spool has gained since the last time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.profiler.trace.spool_records import RECORD, Records, is_header, is_valid

_EMPTY: Records = np.empty(0, RECORD)


class SpoolTail:
    """Reads one spool in pieces. A record that is not complete yet is left for the next time.

    Attributes:
        path: The file.
        header: Its first record; None until it was read.
        is_readable: False for a file that does not begin with the header of this version: nothing of it is read.
        behind: Whether the file had more than the last call has read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Any = None
        self.is_readable = True
        self.behind = False
        self._offset = 0

    def read(self, max_bytes: int) -> Records:
        """Return the complete and valid records after those read so far; none where the file does not exist any more.

        Args:
            max_bytes: Bytes to read at most.
        """
        self.behind = False
        if not self.is_readable:
            return _EMPTY
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self._offset)
                raw = file.read(max_bytes)
        except FileNotFoundError:
            return _EMPTY
        self.behind = len(raw) == max_bytes
        size = len(raw) - len(raw) % RECORD.itemsize
        records: Records = np.frombuffer(raw[:size], RECORD)
        self._offset += size
        if self.header is None and len(records):
            self.is_readable = is_header(records[0])
            if not self.is_readable:
                return _EMPTY
            self.header = records[0]
        return records[is_valid(records)]
