"""Optimizer state in a file that is whole after a crash.

Each subgroup has two regions. A commit names, in one of two alternating headers, the region of each subgroup that has
its state; until the next commit only the other regions are written. So whenever the process or its host stops, the last
commit can be read, whatever was being written. The order of writes and flushes follows from that alone: data, flush,
header, flush.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.storage.direct_file import PAGE, DirectFile, aligned

_MAGIC = b"ebbstate"
_VERSION = 1
# The first page: magic, version, name of the run, number of subgroups, digest of their sizes, CRC of all that.
_IDENTITY = struct.Struct("<8sI16sI32s")
# A header: sequence number; a byte per subgroup, its region or _NONE; the CRC of both and of the name of the run.
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_NONE = 255


@dataclass(frozen=True)
class _Identity:
    """The run and the subgroups that a file has the state of.

    Attributes:
        run: Name of the run, 16 bytes.
        count: Number of subgroups.
        digest: Digest of their sizes.
    """

    run: bytes
    count: int
    digest: bytes


@dataclass(frozen=True)
class _Header:
    """A commit.

    Attributes:
        sequence: Its number, from 1.
        regions: The region of each subgroup that has its state; _NONE: the file does not have it.
    """

    sequence: int
    regions: bytes


class StateFile:
    """The state of subgroups in a file.

    Args:
        path: The file.
        sizes: Bytes of state of each subgroup.
        run: Name of the run, 16 bytes. Commits of another run are never read.
        sequence: The commit to begin with; None for new state.

    Attributes:
        is_direct: Whether the page cache is left out.
        read_bytes: Bytes of state read so far.
        written_bytes: Bytes of state written so far.

    Raises:
        EngineError: The file cannot be used: it has commits of another run, or not the one to begin with; or there is
            too little space.
    """

    def __init__(self, path: Path, sizes: Sequence[int], run: bytes, sequence: int | None = None) -> None:
        self._sizes = list(sizes)
        digest = hashlib.sha256(struct.pack(f"<{len(sizes)}Q", *sizes)).digest()
        self._identity = _Identity(run, len(sizes), digest)
        # Offsets in a region; the regions follow the first page and the headers.
        self._offsets = [0]
        for size in self._sizes:
            self._offsets.append(self._offsets[-1] + aligned(size))
        self._file = DirectFile(path)
        self.is_direct = self._file.is_direct
        self.read_bytes = self.written_bytes = 0
        # The last commit, and the region of each subgroup that was written last.
        self._commit: _Header | None = None
        self._current = bytearray([_NONE] * len(sizes))
        # The regions of which the file has the space.
        self._reserved: set[tuple[int, int]] = set()
        try:
            if sequence is None:
                self._create()
            else:
                self._resume(sequence)
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def sequence(self) -> int:
        """Number of the last commit; 0 if there is none."""
        return 0 if self._commit is None else self._commit.sequence

    def has(self, subgroup: int) -> bool:
        """Return whether the file has state of a subgroup."""
        return self._current[subgroup] != _NONE

    def reserve(self, subgroup: int) -> None:
        """Reserve the space of the next write of a subgroup.

        Raises:
            EngineError: There is too little free space.
        """
        self._reserve(subgroup, self._next_region(subgroup))

    def read(self, subgroup: int, memory: memoryview) -> None:
        """Read the newest state of a subgroup into memory of `aligned(size)` bytes, which begins at a page.

        Raises:
            EngineError: It cannot be read.
        """
        self._file.read(self._offset(subgroup, self._current[subgroup]), memory)
        self.read_bytes += len(memory)

    def write(self, subgroup: int, memory: memoryview) -> None:
        """Write the state of a subgroup from memory of `aligned(size)` bytes, which begins at a page.

        Raises:
            EngineError: It cannot be written.
        """
        region = self._next_region(subgroup)
        self._file.write(self._offset(subgroup, region), memory)
        self._current[subgroup] = region
        self.written_bytes += len(memory)

    def commit(self) -> int:
        """Make the newest state of all subgroups that to begin with after a crash. No read or write may run meanwhile.

        Returns:
            The number of the commit.

        Raises:
            EngineError: There is too little space for the next writes, or the file cannot be written. The commit before
                stays.
        """
        for subgroup, region in enumerate(self._current):
            if region != _NONE:
                self._reserve(subgroup, 1 - region)
        self._file.synchronize()
        header = _Header(self.sequence + 1, bytes(self._current))
        content = _SEQUENCE.pack(header.sequence) + header.regions
        self._write_pages(
            _header_offset(header.sequence % 2, len(self._sizes)), content, zlib.crc32(content + self._identity.run)
        )
        self._file.synchronize()
        self._commit = header
        return header.sequence

    def close(self) -> None:
        """Close the file. One without a commit is removed: nothing could be read from it again."""
        self._file.close()
        if self._commit is None:
            self.path.unlink(missing_ok=True)

    def _create(self) -> None:
        """Begin with new state, in a new file or in that of a run that has never committed."""
        other = self._read_identity()
        if other is None and self._file.size:
            raise EngineError(f"{self.path} is not a file of ebbtide's: remove it, or name another folder")
        if other is not None and self._read_headers(other):
            raise EngineError(
                f"{self.path} has the state of another run: load the checkpoint that names it, remove the file, or "
                "name another folder"
            )
        self._file.truncate()
        self._file.allocate(0, self._offset(0, 0))
        identity = self._identity
        content = _IDENTITY.pack(_MAGIC, _VERSION, identity.run, identity.count, identity.digest)
        self._write_pages(0, content, zlib.crc32(content))

    def _resume(self, sequence: int) -> None:
        """Begin with a commit."""
        headers = self._read_headers(self._identity) if self._read_identity() == self._identity else []
        self._commit = next((header for header in headers if header.sequence == sequence), None)
        if self._commit is None:
            has = " and ".join(str(header.sequence) for header in headers) or "none of this run and these subgroups"
            raise EngineError(
                f"{self.path} does not have commit {sequence}, which the checkpoint names (it has {has}): load the "
                "checkpoint that was saved with it"
            )
        regions = enumerate(self._commit.regions)
        ends = [self._offset(of, region) + aligned(self._sizes[of]) for of, region in regions if region != _NONE]
        if self._file.size < max(ends, default=0):
            raise EngineError(f"{self.path} is cut short: its state is lost, begin with an older checkpoint")
        self._current = bytearray(self._commit.regions)

    def _next_region(self, subgroup: int) -> int:
        """Return the region that the next write of a subgroup goes to: not the committed one."""
        committed = _NONE if self._commit is None else self._commit.regions[subgroup]
        return 0 if committed == _NONE else 1 - committed

    def _reserve(self, subgroup: int, region: int) -> None:
        if (subgroup, region) not in self._reserved:
            self._file.allocate(self._offset(subgroup, region), aligned(self._sizes[subgroup]))
            self._reserved.add((subgroup, region))

    def _offset(self, subgroup: int, region: int) -> int:
        begin = _header_offset(2, len(self._sizes))
        return begin + region * self._offsets[-1] + self._offsets[subgroup]

    def _read_identity(self) -> _Identity | None:
        """Return what the file has the state of, None if it is not a whole state file."""
        content = self._read_pages(0, _IDENTITY.size, b"")
        if content is None:
            return None
        magic, version, *fields = _IDENTITY.unpack(content)
        return _Identity(*fields) if (magic, version) == (_MAGIC, _VERSION) else None

    def _read_headers(self, identity: _Identity) -> list[_Header]:
        """Return the commits of a file."""
        size = _SEQUENCE.size + identity.count
        offsets = [_header_offset(slot, identity.count) for slot in range(2)]
        contents = [self._read_pages(offset, size, identity.run) for offset in offsets]
        return [
            _Header(_SEQUENCE.unpack_from(content)[0], content[_SEQUENCE.size :])
            for content in contents
            if content is not None
        ]

    def _read_pages(self, offset: int, size: int, key: bytes) -> bytes | None:
        """Return content that is followed by its CRC, None if it is not whole. key: more that the CRC is of."""
        nbytes = aligned(size + _CRC.size)
        if self._file.size < offset + nbytes:
            return None
        with mmap.mmap(-1, nbytes) as pages:
            with memoryview(pages) as memory:
                self._file.read(offset, memory)
            content, crc = pages[:size], _CRC.unpack_from(pages, size)[0]
        return content if crc == zlib.crc32(content + key) else None

    def _write_pages(self, offset: int, content: bytes, crc: int) -> None:
        with mmap.mmap(-1, aligned(len(content) + _CRC.size)) as pages:
            pages.write(content + _CRC.pack(crc))
            with memoryview(pages) as memory:
                self._file.write(offset, memory)


def _header_offset(slot: int, count: int) -> int:
    """Return the offset of a header in the file of so many subgroups; that of slot 2 is where the regions begin."""
    return PAGE + slot * aligned(_SEQUENCE.size + count + _CRC.size)
