"""Reads how a process ended that is not a child of this one."""

from __future__ import annotations

import fcntl
import os
import struct

from ebbtide.profiler.processes import stat_fields

# From linux/pidfd.h: PIDFD_GET_INFO is _IOWR(0xFF, 11, struct pidfd_info); the structure's first version has 64 bytes.
_PIDFD_INFO = struct.Struct("<QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


def wait_status(pid: int, pidfd: int) -> int | None:
    """Return the wait status of a process that has ended, as `os.waitpid` would give it to its parent.

    Returns:
        The status; None if the kernel does not give it: before Linux 6.15 only while the parent has not yet asked.
    """
    info = bytearray(_PIDFD_INFO.size)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return _status_of_zombie(pid)
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return status if mask & _PIDFD_INFO_EXIT else _status_of_zombie(pid)


def _status_of_zombie(pid: int) -> int | None:
    """Return the last field of /proc/PID/stat, which is there until the parent has waited for the process."""
    fields = stat_fields(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else None


def exit_meta(status: int | None) -> dict[str, int] | None:
    """Return `exit` of a trace's metadata for a wait status: {"code": n} or {"signal": n}; None if not known."""
    if status is None:
        return None
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}
