"""The options of an optimizer whose state host memory does not hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide import host_limits
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.storage.file_systems import memory_file_system
from ebbtide.interleave.engine.runtime.storage.probe import probe_storage
from ebbtide.interleave.engine.runtime.storage.stored_states import StoredStates
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")

# Of the host memory that is available, this share is used by default.
_HOST_SHARE = 0.8


def storage_options(
    storage: str | Path | Sequence[str | Path] | None, host_memory_budget: float | None
) -> StorageOptions | None:
    """Return the options for arguments of an optimizer; None without storage.

    Raises:
        EngineError: An option is not valid.
    """
    if storage is not None:
        return StorageOptions(storage, host_memory_budget)
    if host_memory_budget is not None:
        raise EngineError("host_memory_budget needs storage=: a folder for state that host memory does not hold")
    return None


class StorageOptions:
    """Folders for state that host memory does not hold, and how much host memory there is.

    Args:
        storage: A folder or several, which are used at the same time; each has a file of this rank.
        host_memory_budget: Bytes of host memory for state and buffers; None: most of what is available.

    Attributes:
        host_bytes: The same.

    Raises:
        EngineError: An option is not valid.
    """

    def __init__(self, storage: str | Path | Sequence[str | Path], host_memory_budget: float | None) -> None:
        folders = [storage] if isinstance(storage, str | Path) else list(storage)
        self._folders = [Path(folder) for folder in folders]
        if not self._folders:
            raise EngineError("storage has no folder: name one, or leave it out")
        for folder in self._folders:
            if not folder.is_dir():
                raise EngineError(f"storage {folder} is not a folder: create it, or name another one")
        if host_memory_budget is not None and not host_memory_budget > 0:
            raise EngineError(f"host_memory_budget is {host_memory_budget}: it must be bytes, above 0")
        self.host_bytes = host_memory_budget
        self._run = os.urandom(16)
        self._files = 0
        self._stored: StoredStates | None = None
        # By the files before these.
        self._written_bytes = 0
        self._is_described = False

    @property
    def written_bytes(self) -> int:
        """Bytes of state written so far."""
        return self._written_bytes + (0 if self._stored is None else self._stored.written_bytes)

    def added_to(self, machine: Machine) -> Machine:
        """Return a machine with this storage and host memory. Paths that it does not know are measured.

        Raises:
            EngineError, MachineError: A folder cannot be written.
        """
        measured = {Path(path.path).resolve(): path for path in machine.storage if path.path is not None}
        paths = tuple(measured.get(folder.resolve()) or probe_storage(folder) for folder in self._folders)
        host_bytes = self.host_bytes or _available_bytes()
        return replace(machine, storage=paths, host_memory_bytes=host_bytes)

    def open(
        self, subgroups: Sequence[Subgroup], device: Device, commit: Mapping[str, Any] | None = None
    ) -> StoredStates:
        """Open the files, one for each folder.

        Args:
            subgroups: The subgroups.
            device: Allocates the buffers.
            commit: What `commit_of` has returned, to go on from; None for new state.

        Raises:
            EngineError: A file cannot be used.
        """
        if commit is not None:
            self._run, names = bytes.fromhex(commit["run"]), commit["files"]
            if len(names) != len(self._folders):
                raise EngineError(
                    f"the checkpoint has state in {len(names)} folders, and storage has {len(self._folders)}: name as "
                    "many, in the same order"
                )
        else:
            rank = os.environ.get("RANK", "0")
            names = [f"ebbtide-rank-{rank}-{self._files}.state" for _ in self._folders]
            self._files += 1
        self._names = names
        files = [folder / name for folder, name in zip(self._folders, names, strict=True)]
        stored = StoredStates(files, subgroups, device, self._run, commit)
        self._written_bytes, self._stored = self.written_bytes, stored
        if not self._is_described:
            self._is_described = True
            self._warn_of_host_memory(stored)
        return stored

    def _warn_of_host_memory(self, stored: StoredStates) -> None:
        """Log which folders use host memory beyond the budget."""
        for folder, is_direct in zip(self._folders, stored.are_direct, strict=True):
            kind = memory_file_system(folder)
            if kind is not None:
                log.warning(
                    "ebbtide: storage %s is a %s: its files are host memory too, beyond host_memory_budget, and lost "
                    "when the host stops; name a folder on a drive",
                    folder,
                    kind,
                )
            elif not is_direct:
                log.warning(
                    "ebbtide: storage %s has no O_DIRECT: its files pass through the page cache, which is slower and "
                    "uses host memory beyond host_memory_budget",
                    folder,
                )

    def commit_of(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `open` takes to go on from what `StoredStates.commit` has returned."""
        return {"run": self._run.hex(), "files": self._names, **states}


def _available_bytes() -> float | None:
    available = host_limits.available_bytes()
    return None if available is None else _HOST_SHARE * available / host_limits.local_ranks()
