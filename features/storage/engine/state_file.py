"""Optimizer state in a file that is whole after a crash.

Each subgroup has two regions. A commit names, in one of two alternating headers, the
region of each subgroup that has its state; until the next commit only the other regions
are written. So whenever the process or its host stops, the last commit can be read,
whatever was being written. The order of writes and flushes follows from that alone:
data, flush, header, flush.

The commit before the last one can be read until the first of its regions is
overwritten. Before that, its header is made void, so that no checkpoint is loaded with
state that is not its own.
"""

import hashlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.features.storage.engine.direct_file import (
    PAGE,
    DirectFile,
    NoSpace,
    aligned,
)
from ebbtide.interleave.engine.errors import EngineError

_MAGIC = b"ebbstate"
_VERSION = 1
# The first page: magic, version, name of the run, number of subgroups, digest of their
# sizes, CRC of all that.
_IDENTITY = struct.Struct("<8sI16sI32s")
# A header: sequence number; a byte per subgroup: region, _NO_REGION or _VOID; the CRC
# of both and of the run's name.
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_NO_REGION = 255
_VOID = 254


class StateFile:
    """The state of subgroups in a file.

    `sizes` are the bytes of each subgroup. The file has the commit `sequence` of a run
    (name of 16 bytes); None: new state. Raises EngineError for commits of another run,
    or not this one, or too little space.
    """

    def __init__(
        self,
        path: Path,
        sizes: Sequence[int],
        run: bytes,
        sequence: int | None = None,
        file: DirectFile | None = None,
    ) -> None:
        self._sizes = list(sizes)
        digest = hashlib.sha256(struct.pack(f"<{len(sizes)}Q", *sizes)).digest()
        self._identity = _Identity(run, len(sizes), digest)
        self._begin = _header_offset(2, len(sizes))
        # Offsets in a region; the regions follow the first page and the headers.
        self._offsets = [0]
        for size in self._sizes:
            self._offsets.append(self._offsets[-1] + aligned(size))
        self._file = file or DirectFile(path)
        self._headers = _CommitHeaders(self._file, self._identity)
        self.is_direct = self._file.is_direct
        self.read_bytes = self.written_bytes = 0
        # The last commit, that in the other header, and the region of each subgroup
        # that was written last.
        self._commit: _Commit | None = None
        self._other: _Commit | None = None
        self._current = bytearray([_NO_REGION] * len(sizes))
        # The regions that the file has space for.
        self._reserved: set[tuple[int, int]] = set()
        try:
            if sequence is None:
                self._create()
            else:
                self._resume(sequence)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def check(
        cls, path: Path, sizes: Sequence[int], run: bytes, sequence: int, is_open: bool
    ) -> None:
        """Raise EngineError if a file does not have a commit. It stays as it is, and
        may be open in this process."""
        file = DirectFile(path, is_read_only=True, is_shared=is_open)
        cls(path, sizes, run, sequence, file)._file.close()

    @property
    def path(self) -> Path:
        return self._file.path

    def reserve(self, subgroups: Sequence[int]) -> None:
        """Reserve the space of the next write of subgroups. Raises EngineError if there
        is too little for all."""
        self._reserve(
            [(subgroup, self._next_region(subgroup)) for subgroup in subgroups]
        )

    def read(self, subgroup: int, memory: memoryview) -> None:
        """Read the newest state of a subgroup into memory.

        The memory has `aligned(size)` bytes, and begins at a page.
        """
        self._file.read(self._offset(subgroup, self._current[subgroup]), memory)
        self.read_bytes += len(memory)

    def write(self, subgroup: int, memory: memoryview) -> None:
        """Write the state of a subgroup from memory.

        The memory has `aligned(size)` bytes, and begins at a page.
        """
        region = self._next_region(subgroup)
        if self._other is not None and self._other.regions[subgroup] == region:
            # Before its state is overwritten: it cannot be loaded any more.
            self._other = _Commit(
                self._other.sequence, bytes([_VOID]) * len(self._sizes)
            )
            self._headers.write(self._other)
        self._file.write(self._offset(subgroup, region), memory)
        self._current[subgroup] = region
        self.written_bytes += len(memory)

    def commit(self) -> int:
        """Make the newest state of all subgroups the one to begin with after a crash.

        Return the commit's number; no read or write may run. Raises EngineError if
        there is too little space for the next writes; the commit before stays.
        """
        written = [
            (subgroup, region)
            for subgroup, region in enumerate(self._current)
            if region != _NO_REGION
        ]
        self._reserve([(subgroup, 1 - region) for subgroup, region in written])
        self._file.synchronize()
        commit = _Commit(self._next_sequence(), bytes(self._current))
        self._headers.write(commit)
        self._other, self._commit = self._commit, commit
        return commit.sequence

    def close(self) -> None:
        """Close the file. One without a commit is removed: nothing could be read from
        it again."""
        self._file.close()
        if self._commit is None and self._file.is_own:
            self.path.unlink(missing_ok=True)

    def _create(self) -> None:
        """Begin with new state.

        The file is new or belongs to a run that has never committed.
        """
        other = self._headers.read_identity()
        if other is None and self._file.size:
            raise EngineError(
                f"{self.path} is not a file of ebbtide's: remove it, or name another "
                "folder"
            )
        if other is not None and self._headers.read(other):
            raise EngineError(
                f"{self.path} has the state of another run: load the checkpoint that "
                "names it, remove the file, or "
                "name another folder"
            )
        # A process that is killed meanwhile leaves an empty file, or one of its own.
        self._file.truncate()
        self._headers.write_identity()
        self._file.allocate(0, self._offset(0, 0))

    def _resume(self, sequence: int) -> None:
        """Begin with a commit."""
        commits = (
            self._headers.read(self._identity)
            if self._headers.read_identity() == self._identity
            else []
        )
        whole = [commit for commit in commits if not commit.is_void]
        self._commit = next(
            (commit for commit in whole if commit.sequence == sequence), None
        )
        if self._commit is None:
            has = (
                " and ".join(str(commit.sequence) for commit in whole)
                or "none of this run and these subgroups"
            )
            raise EngineError(
                f"{self.path} does not have commit {sequence}, which the checkpoint "
                f"names (it has {has}): load the "
                "checkpoint that was saved with it"
            )
        self._other = next(
            (commit for commit in commits if commit is not self._commit), None
        )
        regions = enumerate(self._commit.regions)
        ends = [
            self._offset(of, region) + aligned(self._sizes[of])
            for of, region in regions
            if region != _NO_REGION
        ]
        if self._file.size < max(ends, default=0):
            raise EngineError(
                f"{self.path} is cut short: its state is lost, begin with an older "
                "checkpoint"
            )
        self._current = bytearray(self._commit.regions)

    def _next_sequence(self) -> int:
        """Return the number of the next commit, which is new.

        Its header replaces the other one.
        """
        last = 0 if self._commit is None else self._commit.sequence
        sequence = 1 + max(last, 0 if self._other is None else self._other.sequence)
        return (
            sequence if self._commit is None else sequence + (last + 1 - sequence) % 2
        )

    def _next_region(self, subgroup: int) -> int:
        """Return the region that the next write of a subgroup goes to, which is not the
        committed one."""
        committed = (
            _NO_REGION if self._commit is None else self._commit.regions[subgroup]
        )
        return 0 if committed == _NO_REGION else 1 - committed

    def _reserve(self, places: Sequence[tuple[int, int]]) -> None:
        """Reserve the space of subgroups in regions."""
        missing = [place for place in places if place not in self._reserved]
        for number, place in enumerate(missing):
            subgroup, region = place
            try:
                self._file.allocate(
                    self._offset(subgroup, region), aligned(self._sizes[subgroup])
                )
            except NoSpace:
                raise self._file.lacks_space(
                    sum(aligned(self._sizes[of]) for of, _ in missing[number:])
                ) from None
            self._reserved.add(place)

    def _offset(self, subgroup: int, region: int) -> int:
        return self._begin + region * self._offsets[-1] + self._offsets[subgroup]


@dataclass(frozen=True)
class _Identity:
    """The run in a file, the number of its subgroups, and the digest of their sizes.

    The run is a name of 16 bytes whose state the file has.
    """

    run: bytes
    count: int
    digest: bytes


@dataclass(frozen=True)
class _Commit:
    """A commit, its number (from 1), and the region with each subgroup's state.

    The region is _NO_REGION if none has it.
    """

    sequence: int
    regions: bytes

    @property
    def is_void(self) -> bool:
        """Whether its state may have been overwritten; its number is not used again."""
        return _VOID in self.regions


class _CommitHeaders:
    """The pages of a state file that say whose state it has, and its last commits.

    The first page says whose state; the last two commits have headers.
    """

    def __init__(self, file: DirectFile, identity: _Identity) -> None:
        self._file = file
        self._identity = identity

    def read_identity(self) -> _Identity | None:
        """Return whose state the file has, None if it is not a whole state file."""
        content = self._read_pages(0, _IDENTITY.size, b"")
        if content is None:
            return None
        magic, version, *fields = _IDENTITY.unpack(content)
        return _Identity(*fields) if (magic, version) == (_MAGIC, _VERSION) else None

    def write_identity(self) -> None:
        """Write the first page."""
        identity = self._identity
        self._write_pages(
            0,
            _IDENTITY.pack(
                _MAGIC, _VERSION, identity.run, identity.count, identity.digest
            ),
            b"",
        )

    def read(self, identity: _Identity) -> Sequence[_Commit]:
        """Return the commits of a file with this identity, void ones too."""
        size = _SEQUENCE.size + identity.count
        offsets = [_header_offset(slot, identity.count) for slot in range(2)]
        contents = [self._read_pages(offset, size, identity.run) for offset in offsets]
        return [
            _Commit(_SEQUENCE.unpack_from(content)[0], content[_SEQUENCE.size :])
            for content in contents
            if content is not None
        ]

    def write(self, commit: _Commit) -> None:
        """Write the header of a commit to the drive, in the place of the header of the
        commit before the last."""
        content = _SEQUENCE.pack(commit.sequence) + commit.regions
        offset = _header_offset(commit.sequence % 2, self._identity.count)
        self._write_pages(offset, content, self._identity.run)
        self._file.synchronize()

    def _read_pages(self, offset: int, size: int, key: bytes) -> bytes | None:
        """Return content that is followed by its CRC, None if it is not whole.

        key: further bytes that the CRC covers.
        """
        nbytes = aligned(size + _CRC.size)
        if self._file.size < offset + nbytes:
            return None
        with mmap.mmap(-1, nbytes) as pages:
            with memoryview(pages) as memory:
                self._file.read(offset, memory)
            content, crc = pages[:size], _CRC.unpack_from(pages, size)[0]
        return content if crc == zlib.crc32(content + key) else None

    def _write_pages(self, offset: int, content: bytes, key: bytes) -> None:
        with mmap.mmap(-1, aligned(len(content) + _CRC.size)) as pages:
            pages.write(content + _CRC.pack(zlib.crc32(content + key)))
            with memoryview(pages) as memory:
                self._file.write(offset, memory)


def _header_offset(slot: int, count: int) -> int:
    """Return the offset of a header in the file of `count` subgroups.

    The offset of slot 2 is where the regions begin.
    """
    return PAGE + slot * aligned(_SEQUENCE.size + count + _CRC.size)
