"""Optimizer state in a file that is whole after a crash.

Each subgroup has two regions. A commit names, in one of two alternating headers, the region of each subgroup that has
its state; until the next commit only the other regions are written. So whenever the process or its host stops, the last
commit can be read, whatever was being written. The order of writes and flushes follows from that alone: data, flush,
header, flush.

The commit before the last one can be read until the first of its regions is overwritten. Before that, its header is
made void, so that no checkpoint is loaded with state that is not its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.storage.commit_headers import NO_REGION, Commit, CommitHeaders, Identity
from ebbtide.interleave.engine.runtime.storage.direct_file import DirectFile, aligned


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
        self._identity = Identity(run, len(sizes), digest)
        # Offsets in a region; the regions follow the first page and the headers.
        self._offsets = [0]
        for size in self._sizes:
            self._offsets.append(self._offsets[-1] + aligned(size))
        self._file = DirectFile(path)
        self._headers = CommitHeaders(self._file, self._identity)
        self.is_direct = self._file.is_direct
        self.read_bytes = self.written_bytes = 0
        # The last commit, that in the other header, and the region of each subgroup that was written last.
        self._commit: Commit | None = None
        self._other: Commit | None = None
        self._current = bytearray([NO_REGION] * len(sizes))
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
        return self._current[subgroup] != NO_REGION

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
        if self._other is not None and self._other.regions[subgroup] == region:
            # Before its state is overwritten.
            self._other = self._headers.make_void(self._other)
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
            if region != NO_REGION:
                self._reserve(subgroup, 1 - region)
        self._file.synchronize()
        commit = Commit(self._next_sequence(), bytes(self._current))
        self._headers.write(commit)
        self._other, self._commit = self._commit, commit
        return commit.sequence

    def close(self) -> None:
        """Close the file. One without a commit is removed: nothing could be read from it again."""
        self._file.close()
        if self._commit is None:
            self.path.unlink(missing_ok=True)

    def _create(self) -> None:
        """Begin with new state, in a new file or in that of a run that has never committed."""
        other = self._headers.read_identity()
        if other is None and self._file.size:
            raise EngineError(f"{self.path} is not a file of ebbtide's: remove it, or name another folder")
        if other is not None and self._headers.read(other):
            raise EngineError(
                f"{self.path} has the state of another run: load the checkpoint that names it, remove the file, or "
                "name another folder"
            )
        self._file.truncate()
        self._file.allocate(0, self._offset(0, 0))
        self._headers.write_identity()

    def _resume(self, sequence: int) -> None:
        """Begin with a commit."""
        commits = self._headers.read(self._identity) if self._headers.read_identity() == self._identity else []
        whole = [commit for commit in commits if not commit.is_void]
        self._commit = next((commit for commit in whole if commit.sequence == sequence), None)
        if self._commit is None:
            has = " and ".join(str(commit.sequence) for commit in whole) or "none of this run and these subgroups"
            raise EngineError(
                f"{self.path} does not have commit {sequence}, which the checkpoint names (it has {has}): load the "
                "checkpoint that was saved with it"
            )
        self._other = next((commit for commit in commits if commit is not self._commit), None)
        regions = enumerate(self._commit.regions)
        ends = [self._offset(of, region) + aligned(self._sizes[of]) for of, region in regions if region != NO_REGION]
        if self._file.size < max(ends, default=0):
            raise EngineError(f"{self.path} is cut short: its state is lost, begin with an older checkpoint")
        self._current = bytearray(self._commit.regions)

    def _next_sequence(self) -> int:
        """Return the number of the next commit, which is new, and whose header replaces the other one."""
        sequence = 1 + max(self.sequence, 0 if self._other is None else self._other.sequence)
        return sequence if self._commit is None else sequence + (self.sequence + 1 - sequence) % 2

    def _next_region(self, subgroup: int) -> int:
        """Return the region that the next write of a subgroup goes to: not the committed one."""
        committed = NO_REGION if self._commit is None else self._commit.regions[subgroup]
        return 0 if committed == NO_REGION else 1 - committed

    def _reserve(self, subgroup: int, region: int) -> None:
        if (subgroup, region) not in self._reserved:
            self._file.allocate(self._offset(subgroup, region), aligned(self._sizes[subgroup]))
            self._reserved.add((subgroup, region))

    def _offset(self, subgroup: int, region: int) -> int:
        return self._headers.end + region * self._offsets[-1] + self._offsets[subgroup]
