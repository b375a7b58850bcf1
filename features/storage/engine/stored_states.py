"""State of subgroups that host memory does not hold: the folders and files, and the
memory through which state passes."""

import logging
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ebbtide import host_limits
from ebbtide.features.storage.engine.direct_file import (
    PAGE,
    aligned,
    memory_file_system,
)
from ebbtide.features.storage.engine.speed import probe_storage
from ebbtide.features.storage.engine.state_file import StateFile
from ebbtide.features.storage.kinds import path_of
from ebbtide.interleave.engine.commits import commit_place
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.backing import BackedStates, Backing
from ebbtide.interleave.engine.runtime.layout import (
    Subgroup,
    state_elements,
    state_shape,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")

# Of the host memory that is available, this share is used by default.
_HOST_SHARE = 0.8


class StoredStates(BackedStates):
    """The states in files, one for each path. `run`: name of 16 bytes; `commit`: what
    `commit` has returned, None for new state. Raises EngineError if a file cannot be
    used; see StateFile."""

    def __init__(
        self,
        paths: Sequence[Path],
        subgroups: Sequence[Subgroup],
        device: Device,
        run: bytes,
        commit: Mapping[str, Any] | None = None,
    ) -> None:
        self._shapes = [state_shape(subgroup) for subgroup in subgroups]
        self._sizes = _state_sizes(subgroups)
        self._device = device
        self._run = run
        self.files: list[StateFile] = []
        try:
            for number, path in enumerate(paths):
                sequence = None if commit is None else int(commit["sequences"][number])
                self.files.append(StateFile(path, self._sizes, run, sequence))
        except BaseException:
            self.close()
            raise
        # The path that has the state of each subgroup.
        self._path_of: dict[int, int] = {}
        if commit is not None:
            self._path_of = dict(enumerate(commit["paths"]))
        # The path to which the next write of a subgroup goes, of those that a plan has
        # in storage.
        self._planned_path_of: dict[int, int] = {}
        self._buffers: list[torch.Tensor] = []
        # The pages of a buffer that a state has been read into.
        self._loaded: dict[int, torch.Tensor] = {}

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def read_bytes(self) -> int:  # type: ignore[override]
        return sum(file.read_bytes for file in self.files)

    @property
    def written_bytes(self) -> int:  # type: ignore[override]
        return sum(file.written_bytes for file in self.files)

    def has(self, subgroup: int) -> bool:
        """Return whether the newest state of a subgroup is in a file."""
        return subgroup in self._path_of

    def is_planned(self, subgroup: int) -> bool:
        """Return whether the plan has the state of a subgroup in storage."""
        return subgroup in self._planned_path_of

    def prepare(self, plan: Plan) -> None:
        """Allocate the buffers of a plan, and reserve space for its writes. Raises
        EngineError if it is too little."""
        self._loaded = {}
        self._planned_path_of = {
            op.subgroup: path_of(op) for op in plan.ops if op.kind == "write"
        }
        for number, file in enumerate(self.files):
            file.reserve(
                [
                    subgroup
                    for subgroup, path in self._planned_path_of.items()
                    if path == number
                ]
            )
        reads = [op for op in plan.ops if op.kind == "read"]
        # Of several rules the plan knows the mean size of a state.
        largest = {
            op.tag: max(self._sizes[of.subgroup] for of in reads if of.tag == op.tag)
            for op in reads
        }
        sizes = [
            aligned(max(int(size), largest.get(number, 0)))
            for number, size in enumerate(plan.storage_buffers)
        ]
        if sizes != [len(buffer) for buffer in self._buffers]:
            self._buffers = []
            self._buffers = [self._allocate(size) for size in sizes]

    def load(self, subgroup: int, number: int) -> torch.Tensor:
        """Read a state into a buffer of the plan, by its index.

        Return it, of `state_shape`, in the buffer.
        """
        self._loaded[subgroup] = self._buffers[number][: aligned(self._sizes[subgroup])]
        return self._read(subgroup, self._loaded[subgroup])

    def reload(self, subgroup: int) -> None:
        """Read a state again into its buffer, of `load`."""
        self._read(subgroup, self._loaded[subgroup])

    def save(self, subgroup: int) -> None:
        """Write a state that is in a buffer, of `load`."""
        self._write(subgroup, self._loaded[subgroup])

    def read(self, subgroup: int) -> torch.Tensor:
        """Return the state of a subgroup in new host memory, of `state_shape`."""
        return self._read(subgroup, _pages(aligned(self._sizes[subgroup])))

    def write(self, subgroup: int, state: torch.Tensor) -> None:
        """Write the state of a subgroup from any memory."""
        self._write(
            subgroup,
            self._copied(subgroup, state, _pages(aligned(self._sizes[subgroup]))),
        )

    def move_in(self, subgroup: int, state: torch.Tensor) -> None:
        """Write the state of a subgroup from any memory, through a buffer. None of them
        may be in use."""
        self._write(subgroup, self._copied(subgroup, state, self._free_pages(subgroup)))

    def move_out(self, subgroup: int, state: torch.Tensor) -> None:
        """Read the state of a subgroup into any memory, through a buffer, for good. No
        buffer may be in use."""
        state.copy_(self._read(subgroup, self._free_pages(subgroup)))
        # That in the file is old from now on.
        del self._path_of[subgroup]

    def commit(self, read: Callable[[int], torch.Tensor]) -> dict[str, Any]:
        """Make the newest state of all subgroups the one to resume from.

        Return what `StorageOptions.open` takes. No operation may run, and no buffer may
        be in use. `read` returns a state that is not in a file.
        """
        paths = []
        for subgroup in range(len(self._sizes)):
            path = self._path_of.get(subgroup)
            if path is None:
                # It stays elsewhere: the file has a copy.
                path = self._planned_path_of.get(subgroup, subgroup % len(self.files))
                self.files[path].reserve([subgroup])
                copy = self._copied(
                    subgroup, read(subgroup), self._free_pages(subgroup)
                )
                self.files[path].write(subgroup, _bytes_of(copy))
            paths.append(path)
        names, sequences = (
            [file.path.name for file in self.files],
            [file.commit() for file in self.files],
        )
        folders = [str(file.path.parent.resolve()) for file in self.files]
        return {
            "run": self._run.hex(),
            "folders": folders,
            "files": names,
            "paths": paths,
            "sequences": sequences,
        }

    def close(self) -> None:
        """Close the files. Those without a commit are removed."""
        self._buffers, self._loaded = [], {}
        for file in self.files:
            file.close()

    def _read(self, subgroup: int, pages: torch.Tensor) -> torch.Tensor:
        self.files[self._path_of[subgroup]].read(subgroup, _bytes_of(pages))
        return self._state_in(pages, subgroup)

    def _write(self, subgroup: int, pages: torch.Tensor) -> None:
        path = self._planned_path_of.get(subgroup, self._path_of.get(subgroup, 0))
        self.files[path].reserve([subgroup])
        self.files[path].write(subgroup, _bytes_of(pages))
        self._path_of[subgroup] = path

    def _free_pages(self, subgroup: int) -> torch.Tensor:
        """Return the pages of a buffer that a state fits in.

        If none is large enough, they are of new memory.
        """
        nbytes = aligned(self._sizes[subgroup])
        large = next(
            (buffer for buffer in self._buffers if len(buffer) >= nbytes), None
        )
        return _pages(nbytes) if large is None else large[:nbytes]

    def _copied(
        self, subgroup: int, state: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """Copy a state to pages, and return them."""
        self._state_in(pages, subgroup).copy_(state)
        return pages

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory of `nbytes` that begins at a page."""
        memory = self._device.allocate_host((nbytes + PAGE,), torch.uint8)
        begin = -memory.data_ptr() % PAGE
        return memory[begin : begin + nbytes]

    def _state_in(self, pages: torch.Tensor, subgroup: int) -> torch.Tensor:
        return (
            pages[: self._sizes[subgroup]]
            .view(torch.float32)
            .view(self._shapes[subgroup])
        )


def _pages(nbytes: int) -> torch.Tensor:
    """Return host memory of this many bytes that begins at a page, and goes back to the
    system when it is released."""
    # The allocator behind torch.empty keeps blocks of up to 32 MiB.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _state_sizes(subgroups: Sequence[Subgroup]) -> list[int]:
    """Return the bytes of the state of each subgroup."""
    return [torch.float32.itemsize * state_elements(subgroup) for subgroup in subgroups]


def _bytes_of(pages: torch.Tensor) -> memoryview:
    return memoryview(pages.numpy())


class StorageOptions(Backing):
    """Folders for state that host memory does not hold, used at the same time with a
    file of this rank in each.

    The bytes are host memory for state and buffers (None: most of what is available).
    Raises EngineError if one is not valid."""

    is_used = True

    def __init__(
        self,
        storage: str | Path | Sequence[str | Path],
        host_memory_budget: float | None,
    ) -> None:
        folders = [storage] if isinstance(storage, str | Path) else list(storage)
        self._folders = [Path(folder) for folder in folders]
        if not self._folders:
            raise EngineError("storage has no folder: name one, or leave it out")
        for folder in self._folders:
            if not folder.is_dir():
                raise EngineError(
                    f"storage {folder} is not a folder: create it, or name another one"
                )
        if host_memory_budget is not None and not host_memory_budget > 0:
            raise EngineError(
                f"host_memory_budget is {host_memory_budget}: it must be bytes, above 0"
            )
        self.host_bytes = host_memory_budget
        self._run = os.urandom(16)
        self._files = 0
        self._stored: StoredStates | None = None
        # By the files before these.
        self._written_bytes = 0
        self._is_described = False

    @property
    def written_bytes(self) -> int:  # type: ignore[override]
        """Bytes of state written so far."""
        return self._written_bytes + (
            0 if self._stored is None else self._stored.written_bytes
        )

    def added_to(self, machine: Machine) -> Machine:
        """Return a machine with this storage and host memory. Paths that it does not
        know are measured."""
        measured = {
            Path(path.path).resolve(): path
            for path in machine.storage
            if path.path is not None
        }
        paths = tuple(
            measured.get(folder.resolve()) or probe_storage(folder)
            for folder in self._folders
        )
        available = host_limits.available_bytes()
        default_bytes = (
            None
            if available is None
            else _HOST_SHARE * available / host_limits.local_ranks()
        )
        return replace(
            machine, storage=paths, host_memory_bytes=self.host_bytes or default_bytes
        )

    def check(self, subgroups: Sequence[Subgroup], commit: Mapping[str, Any]) -> None:
        """Raise EngineError if the folders do not have a commit of these subgroups.

        Raise it also if the commit is in use by others.
        """
        names, run = commit["files"], bytes.fromhex(commit["run"])
        if len(names) != len(self._folders):
            raise EngineError(
                f"the checkpoint has state in {len(names)} folders, and storage has "
                f"{len(self._folders)}: name as "
                "many, in the same order"
            )
        used = (
            [] if self._stored is None else [file.path for file in self._stored.files]
        )
        for folder, name, sequence in zip(
            self._folders, names, commit["sequences"], strict=True
        ):
            path = folder / name
            try:
                StateFile.check(
                    path, _state_sizes(subgroups), run, sequence, is_open=path in used
                )
            except EngineError as error:
                raise EngineError(f"{error} ({commit_place(commit)})") from None

    def open(
        self,
        subgroups: Sequence[Subgroup],
        device: Device,
        commit: Mapping[str, Any] | None = None,
    ) -> StoredStates:
        """Open the files, one for each folder, with the state of a checked commit.

        Return None for new state.
        """
        if commit is not None:
            self._run, names = bytes.fromhex(commit["run"]), commit["files"]
        else:
            rank = os.environ.get("RANK", "0")
            names = [f"ebbtide-rank-{rank}-{self._files}.state" for _ in self._folders]
            self._files += 1
        files = [
            folder / name for folder, name in zip(self._folders, names, strict=True)
        ]
        stored = StoredStates(files, subgroups, device, self._run, commit)
        self._written_bytes, self._stored = self.written_bytes, stored
        if not self._is_described:
            self._is_described = True
            self._warn_of_host_memory(stored)
        return stored

    def _warn_of_host_memory(self, stored: StoredStates) -> None:
        """Log which folders use host memory beyond the budget."""
        for folder, file in zip(self._folders, stored.files, strict=True):
            kind = memory_file_system(folder)
            if kind is not None:
                log.warning(
                    "ebbtide: storage %s is a %s: its files are host memory too, "
                    "beyond host_memory_budget, and lost "
                    "when the host stops; name a folder on a drive",
                    folder,
                    kind,
                )
            elif not file.is_direct:
                log.warning(
                    "ebbtide: storage %s has no O_DIRECT: its files pass through the "
                    "page cache, which is slower and "
                    "uses host memory beyond host_memory_budget",
                    folder,
                )
