"""Programs that the job starts to change files, which are not run."""

import os
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

from ebbtide.profiler.agent.patches import Patches

_CHANGING = frozenset(
    {"cp", "dd", "ln", "mv", "rm", "rmdir", "rsync", "shred", "truncate", "unlink"}
)


def leave_out_programs(patches: Patches, on_left_out: Callable[[str], None]) -> None:
    """Start `true` in place of programs that change files, until `patches.undo()`."""
    start, system = subprocess.Popen.__init__, os.system

    def start_other(self: Any, args: Any, *more: Any, **options: Any) -> None:
        program = changing_program(args)
        if program is None:
            start(self, args, *more, **options)
            return
        on_left_out(program)
        options.update(shell=False, executable=None)
        start(self, ["true"], *more, **options)

    def run_other(command: Any) -> int:
        program = changing_program(command)
        if program is None:
            return system(command)
        on_left_out(program)
        return 0

    patches.set(subprocess.Popen, "__init__", start_other)
    patches.set(os, "system", run_other)


def changing_program(command: Any) -> str | None:
    """Return the name of a program in a command, as text or words, that changes files;
    None if there is none."""
    try:
        words = (
            [command]
            if isinstance(command, (str, bytes, os.PathLike))
            else list(command)
        )
        names = [
            name
            for word in words
            for name in shlex.split(os.fsdecode(word), comments=False)
        ]
    except (TypeError, ValueError):
        return None
    return next(
        (name for name in map(os.path.basename, names) if name in _CHANGING), None
    )
