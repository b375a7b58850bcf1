"""Binds memory and threads of this process to a NUMA node.

Binding never fails: where the host refuses it, the memory or thread stays as it was,
and one log line says so.
"""

import ctypes
import functools
import logging
import os
import platform
from concurrent.futures import ThreadPoolExecutor

from ebbtide.numa.topology import cpus_text, node_cpus

log = logging.getLogger("ebbtide")

# Numbers of the system call, by `uname -m` (arch/x86/entry/syscalls/syscall_64.tbl,
# asm-generic/unistd.h).
_MBIND = {"x86_64": 237, "aarch64": 235}
# From linux/mempolicy.h. If the node is full, the kernel takes another one; MPOL_BIND
# would end the process.
_MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def cpus_within(node: int) -> frozenset[int]:
    """Return the logical cores of a node that the calling thread may use, if any."""
    return node_cpus(node) & os.sched_getaffinity(0)


def bind_thread(node: int | None) -> None:
    """Let the calling thread run only on its logical cores of a node.

    If it has none, or the node is None, leave it as it is.
    """
    if node is None:
        return
    cpus = cpus_within(node)
    if not cpus:
        _log_once(
            f"threads are not bound to NUMA node {node}: this process may use none of "
            "its cores"
        )
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        _log_once(f"threads are not bound to NUMA node {node}: {error.strerror}")
        return
    _log_once(
        f"threads of the update run on NUMA node {node} (cores {cpus_text(cpus)})"
    )


def place_memory(address: int, nbytes: int, node: int | None) -> bool:
    """Place memory that was mapped and not yet touched on a node as far as there is
    room; return whether it is.

    Containers often forbid `mbind`. Then a thread on the node touches the memory first,
    which has the same effect.
    """
    if node is None:
        return False
    error = _prefer_node(address, nbytes, node)
    if error is None:
        _log_once(f"host memory is on NUMA node {node}")
        return True
    cpus = cpus_within(node)
    if cpus and _touch_on(cpus, address, nbytes):
        _log_once(
            f"host memory is on NUMA node {node}, by first touch (mbind: {error})"
        )
        return True
    _log_once(f"host memory is not bound to NUMA node {node}: {error}")
    return False


def _prefer_node(address: int, nbytes: int, node: int) -> str | None:
    """Let the kernel take pages of a range from a node.

    Return why it does not, None if it does.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not known on {platform.machine()}"
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[-1] = 1 << node % _WORD_BITS
    mbind = ctypes.CDLL(None, use_errno=True).syscall
    mbind.restype = ctypes.c_long
    # The kernel reads one bit less than it is told.
    arguments = (
        ctypes.c_ulong(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
    )
    if (
        mbind(
            ctypes.c_long(number),
            *arguments,
            mask,
            ctypes.c_ulong(words * _WORD_BITS + 1),
            ctypes.c_uint(0),
        )
        == 0
    ):
        return None
    return os.strerror(ctypes.get_errno())


def _touch_on(cpus: frozenset[int], address: int, nbytes: int) -> bool:
    """Write a range by a thread on some cores.

    Return whether the thread could run there.
    """

    def touch() -> bool:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            return False
        ctypes.memset(address, 0, nbytes)
        return True

    with ThreadPoolExecutor(1, "ebbtide-first-touch") as pool:
        return pool.submit(touch).result()


@functools.cache
def _log_once(log_line: str) -> None:
    """Log a line, the first time in this process.

    Many buffers and threads are bound alike.
    """
    log.info("%s", log_line)
