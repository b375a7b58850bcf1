"""The pages of a state file that say whose state it has, and which commits of it can be loaded."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.interleave.engine.runtime.storage.direct_file import PAGE, DirectFile, aligned

_MAGIC = b"ebbstate"
_VERSION = 1
# The first page: magic, version, name of the run, number of subgroups, digest of their sizes, CRC of all that.
_IDENTITY = struct.Struct("<8sI16sI32s")
# A header: sequence number; a byte per subgroup, its region, NO_REGION or _VOID; the CRC of both and of the name of the
# run.
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
NO_REGION = 255
_VOID = 254


@dataclass(frozen=True)
class Identity:
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
class Commit:
    """A commit.

    Attributes:
        sequence: Its number, from 1.
        regions: The region of each subgroup that has its state; NO_REGION: the file does not have it.
    """

    sequence: int
    regions: bytes

    @property
    def is_void(self) -> bool:
        """Whether its state may have been overwritten; its number is not used again."""
        return _VOID in self.regions


class CommitHeaders:
    """The first page of a state file, and two headers with the last two commits.

    Args:
        file: The file.
        identity: What the file is to have the state of.
    """

    def __init__(self, file: DirectFile, identity: Identity) -> None:
        self._file = file
        self._identity = identity

    @property
    def end(self) -> int:
        """Offset in the file after the headers."""
        return _header_offset(2, self._identity.count)

    def read_identity(self) -> Identity | None:
        """Return what the file has the state of, None if it is not a whole state file."""
        content = self._read_pages(0, _IDENTITY.size, b"")
        if content is None:
            return None
        magic, version, *fields = _IDENTITY.unpack(content)
        return Identity(*fields) if (magic, version) == (_MAGIC, _VERSION) else None

    def write_identity(self) -> None:
        """Write the first page."""
        identity = self._identity
        content = _IDENTITY.pack(_MAGIC, _VERSION, identity.run, identity.count, identity.digest)
        self._write_pages(0, content, zlib.crc32(content))

    def read(self, identity: Identity) -> Sequence[Commit]:
        """Return the commits of a file with this identity, void ones too."""
        size = _SEQUENCE.size + identity.count
        offsets = [_header_offset(slot, identity.count) for slot in range(2)]
        contents = [self._read_pages(offset, size, identity.run) for offset in offsets]
        return [
            Commit(_SEQUENCE.unpack_from(content)[0], content[_SEQUENCE.size :])
            for content in contents
            if content is not None
        ]

    def write(self, commit: Commit) -> None:
        """Write the header of a commit, and return when it is on the drive. One with an even number replaces one with
        an even number."""
        content = _SEQUENCE.pack(commit.sequence) + commit.regions
        offset = _header_offset(commit.sequence % 2, self._identity.count)
        self._write_pages(offset, content, zlib.crc32(content + self._identity.run))
        self._file.synchronize()

    def make_void(self, commit: Commit) -> Commit:
        """Write that a commit cannot be loaded any more, and return it so."""
        void = Commit(commit.sequence, bytes([_VOID]) * self._identity.count)
        self.write(void)
        return void

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
