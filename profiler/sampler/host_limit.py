"""Watches the host memory of a job against the limit of its control group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ebbtide.host_limits import MemoryGroup, memory_group
from ebbtide.units import bytes_text

# From this share of the limit on there is a warning.
WARNING_SHARE = 0.9


class HostLimitWatch:
    """Reads how much of its limit a job uses, and warns once per control group before the kernel ends the job.

    Args:
        root: The folder that holds `sys` and `proc`.

    Attributes:
        description: The limit for the trace's metadata; None while no process with one was seen.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.description: dict[str, Any] | None = None
        self._root = root
        self._groups: dict[int, MemoryGroup | None] = {}
        self._warned: set[Path] = set()
        self._warnings: list[str] = []

    def read(self, pids: Iterable[int], regular: bool) -> Iterator[tuple[int, int]]:
        """Yield (process, bytes in use in its control group).

        Args:
            pids: The processes of the job.
            regular: Whether all are to be read; otherwise only those that are near their limit.
        """
        members: dict[MemoryGroup, list[int]] = {}
        for pid in pids:
            if pid not in self._groups:
                self._groups[pid] = self._find(pid)
            group = self._groups[pid]
            if group is not None:
                members.setdefault(group, []).append(pid)
        for group, group_pids in members.items():
            warning_bytes = WARNING_SHARE * group.limit_bytes
            if not regular and (group.total_bytes() or 0) < warning_bytes:
                continue
            used_bytes = group.used_bytes()
            if used_bytes is None:
                continue
            if used_bytes >= warning_bytes and group.folder not in self._warned:
                self._warned.add(group.folder)
                self._warnings.append(
                    f"host memory is nearly used up: {bytes_text(used_bytes)} of the {bytes_text(group.limit_bytes)} "
                    f"that the job's control group may use ({used_bytes / group.limit_bytes:.0%}, pinned memory "
                    "included); at the limit the kernel ends the job"
                )
            for pid in group_pids:
                yield pid, used_bytes

    def new_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _find(self, pid: int) -> MemoryGroup | None:
        group = memory_group(pid, self._root)
        if group is not None and self.description is None:
            path = "/" + str(group.folder.relative_to(self._root))
            self.description = {"control_group": path, "bytes": group.limit_bytes}
        return group
