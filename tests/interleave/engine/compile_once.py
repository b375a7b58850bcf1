"""Lets one process compile a loop while others that need it wait for its file: pytest's
workers, and ranks of a job."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import numba.core.dispatcher
from numba.core.caching import NullCache

_compile = numba.core.dispatcher.Dispatcher.compile


def compile_once() -> None:
    """Let this process wait for others that compile the same loop."""
    numba.core.dispatcher.Dispatcher.compile = _compile_or_wait


def _compile_or_wait(loop: Any, signature: Any) -> Any:
    if isinstance(loop._cache, NullCache):
        return _compile(loop, signature)
    with open(
        Path(loop._cache.cache_path) / f"{loop.py_func.__qualname__}.lock", "w"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _compile(loop, signature)
