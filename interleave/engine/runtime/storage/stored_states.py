"""State of subgroups in files, and the host memory through which it passes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.state_rows import state_elements, state_shape
from ebbtide.interleave.engine.runtime.storage.direct_file import PAGE, aligned
from ebbtide.interleave.engine.runtime.storage.state_file import StateFile
from ebbtide.interleave.model.plan import Plan


class StoredStates:
    """The states that are in files, one file for each path.

    Args:
        paths: A file for each path of the storage.
        subgroups: The subgroups.
        device: Allocates the buffers.
        run: Name of the run, 16 bytes.
        commit: What `commit` has returned, to begin with; None for new state.

    Raises:
        EngineError: A file cannot be used; see StateFile.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        subgroups: Sequence[Subgroup],
        device: Device,
        run: bytes,
        commit: Mapping[str, Any] | None = None,
    ) -> None:
        self._shapes = [state_shape(subgroup) for subgroup in subgroups]
        self._sizes = [torch.float32.itemsize * state_elements(subgroup) for subgroup in subgroups]
        self._device = device
        self._files: list[StateFile] = []
        try:
            for number, path in enumerate(paths):
                sequence = None if commit is None else int(commit["sequences"][number])
                self._files.append(StateFile(path, self._sizes, run, sequence))
        except BaseException:
            self.close()
            raise
        # The path that has the state of each subgroup.
        self._path_of: dict[int, int] = {}
        if commit is not None:
            self._path_of = dict(enumerate(commit["paths"]))
        # The path to which the next write of a subgroup goes, of those that a plan has in storage.
        self._planned_path_of: dict[int, int] = {}
        self._buffers: list[torch.Tensor] = []

    @property
    def path_count(self) -> int:
        """Number of paths."""
        return len(self._files)

    @property
    def host_bytes(self) -> int:
        """Host memory of the buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def are_direct(self) -> list[bool]:
        """Whether the file of each path is read and written without the page cache."""
        return [file.is_direct for file in self._files]

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return sum(file.read_bytes for file in self._files)

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""
        return sum(file.written_bytes for file in self._files)

    def has(self, subgroup: int) -> bool:
        """Return whether the newest state of a subgroup is in a file."""
        return subgroup in self._path_of

    def is_planned(self, subgroup: int) -> bool:
        """Return whether the plan has the state of a subgroup in storage."""
        return subgroup in self._planned_path_of

    def prepare(self, plan: Plan) -> None:
        """Allocate the buffers of a plan, and reserve the space that its writes need.

        Raises:
            EngineError: There is too little memory or space.
        """
        self._planned_path_of = {op.subgroup: op.path for op in plan.ops if op.kind == "write"}
        for subgroup, path in self._planned_path_of.items():
            self._files[path].reserve(subgroup)
        sizes = [aligned(int(size)) for size in plan.storage_buffers]
        if sizes != [len(buffer) for buffer in self._buffers]:
            self._buffers = []
            self._buffers = [self._allocate(size) for size in sizes]

    def load(self, subgroup: int, number: int) -> torch.Tensor:
        """Read a state into a buffer of the plan.

        Args:
            subgroup: The subgroup.
            number: The buffer, by its index.

        Returns:
            The state, of `state_shape`, in the buffer.
        """
        pages = self._buffers[number][: aligned(self._sizes[subgroup])]
        self._files[self._path_of[subgroup]].read(subgroup, _bytes_of(pages))
        return self._state_in(pages, subgroup)

    def reload(self, subgroup: int, state: torch.Tensor) -> None:
        """Read a state again into its buffer, of `load`."""
        self._files[self._path_of[subgroup]].read(subgroup, self._buffer_of(subgroup, state))

    def save(self, subgroup: int, state: torch.Tensor) -> None:
        """Write a state that is in a buffer, of `load`."""
        self._write(subgroup, self._buffer_of(subgroup, state))

    def read(self, subgroup: int) -> torch.Tensor:
        """Return the state of a subgroup in new host memory, of `state_shape`."""
        pages = _pages(aligned(self._sizes[subgroup]))
        self._files[self._path_of[subgroup]].read(subgroup, _bytes_of(pages))
        return self._state_in(pages, subgroup)

    def write(self, subgroup: int, state: torch.Tensor) -> None:
        """Write the state of a subgroup from any memory."""
        self._write(subgroup, self._copy_of(subgroup, state, _pages(aligned(self._sizes[subgroup]))))

    def move_in(self, subgroup: int, state: torch.Tensor) -> None:
        """Write the state of a subgroup from any memory, through a buffer. None of them may be in use."""
        self._write(subgroup, self._copy_of(subgroup, state, self._free_pages(subgroup)))

    def move_out(self, subgroup: int, state: torch.Tensor) -> None:
        """Read the state of a subgroup into any memory, through a buffer, and `forget` it. No buffer may be in use."""
        pages = self._free_pages(subgroup)
        self._files[self._path_of[subgroup]].read(subgroup, _bytes_of(pages))
        state.copy_(self._state_in(pages, subgroup))
        self.forget(subgroup)

    def forget(self, subgroup: int) -> None:
        """Take the state of a subgroup as elsewhere from now on: that in the file is old."""
        self._path_of.pop(subgroup, None)

    def commit(self, read: Callable[[int], torch.Tensor]) -> dict[str, Any]:
        """Make the newest state of all subgroups that to go on with after a crash.

        No operation may run meanwhile, and no buffer may be in use.

        Args:
            read: Returns the state of a subgroup that is not in a file.

        Returns:
            What the constructor takes to go on.
        """
        paths = []
        for subgroup in range(len(self._sizes)):
            path = self._path_of.get(subgroup)
            if path is None:
                # It stays elsewhere: the file has a copy.
                path = self._planned_path_of.get(subgroup, subgroup % len(self._files))
                self._files[path].reserve(subgroup)
                copy = self._copy_of(subgroup, read(subgroup), self._free_pages(subgroup))
                self._files[path].write(subgroup, copy)
            paths.append(path)
        return {"paths": paths, "sequences": [file.commit() for file in self._files]}

    def close(self) -> None:
        """Close the files. Those without a commit are removed."""
        self._buffers = []
        for file in self._files:
            file.close()

    def _write(self, subgroup: int, memory: memoryview) -> None:
        path = self._planned_path_of.get(subgroup, self._path_of.get(subgroup, 0))
        self._files[path].reserve(subgroup)
        self._files[path].write(subgroup, memory)
        self._path_of[subgroup] = path

    def _free_pages(self, subgroup: int) -> torch.Tensor:
        """Return the pages of a buffer that a state fits in; of new memory, if none is large enough."""
        nbytes = aligned(self._sizes[subgroup])
        large = next((buffer for buffer in self._buffers if len(buffer) >= nbytes), None)
        return _pages(nbytes) if large is None else large[:nbytes]

    def _copy_of(self, subgroup: int, state: torch.Tensor, pages: torch.Tensor) -> memoryview:
        """Copy a state to pages, and return their bytes."""
        self._state_in(pages, subgroup).copy_(state)
        return _bytes_of(pages)

    def _buffer_of(self, subgroup: int, state: torch.Tensor) -> memoryview:
        """Return the bytes of the buffer that a state is in."""
        memory = (ctypes.c_char * aligned(self._sizes[subgroup])).from_address(state.data_ptr())
        return memoryview(memory).cast("B")

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory of so many bytes that begins at a page."""
        memory = self._device.allocate_host((nbytes + PAGE,), torch.uint8)
        begin = -memory.data_ptr() % PAGE
        return memory[begin : begin + nbytes]

    def _state_in(self, pages: torch.Tensor, subgroup: int) -> torch.Tensor:
        return pages[: self._sizes[subgroup]].view(torch.float32).view(self._shapes[subgroup])


def _pages(nbytes: int) -> torch.Tensor:
    """Return host memory of so many bytes that begins at a page, and goes back to the system when it is released."""
    # The allocator behind torch.empty keeps blocks of up to 32 MiB.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _bytes_of(pages: torch.Tensor) -> memoryview:
    return memoryview(pages.numpy())
