"""Ends the processes of a step or of a part, wherever they are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path


def marked() -> tuple[str, dict[str, str]]:
    """Return a mark of processes, and the variable that gives it to a process and all
    its descendants.

    Groups and sessions do not do: ninja and others start groups of their own, which
    live on.
    """
    mark = f"EBBTIDE_BENCHMARK_{uuid.uuid4().hex}"
    return mark, {mark: "1"}


def end(mark: str, number: signal.Signals) -> None:
    """Send a signal to all processes with a mark, once to each."""
    signalled: set[str] = set()
    # A process that begins has its environment a moment later.
    for delay_s in (0.0, 0.1):
        time.sleep(delay_s)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    folder.name not in signalled
                    and mark.encode() in (folder / "environ").read_bytes()
                ):
                    os.kill(int(folder.name), number)
                    signalled.add(folder.name)
