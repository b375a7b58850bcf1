"""Refuses what would change a file of the user, whichever function of Python does it."""

from __future__ import annotations

import os
import sys
from typing import Any

from ebbtide.profiler.dryrun.file_system.paths import real_entry, status_of
from ebbtide.profiler.dryrun.file_system.view import FileView

_WRITES = os.O_WRONLY | os.O_RDWR
# Audit events -> positions of the paths that are changed, and of the descriptors of folders that they start from.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
    "os.link": ((0, 2),),
}


class FileGuard:
    """Refuses changes that a `FileView` did not redirect: by functions that were taken before they were replaced.

    An audit hook cannot be removed from a process; one serves all dry runs, one after the other.
    """

    def __init__(self) -> None:
        self._view: FileView | None = None
        self._installed = False

    def start(self, view: FileView) -> None:
        """Refuse from now on what the view does not allow."""
        self._view = view
        if not self._installed:
            sys.addaudithook(self._audit)
            self._installed = True

    def stop(self) -> None:
        """Refuse nothing more."""
        self._view = None

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        view = self._view
        if view is None:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wa+") if isinstance(mode, str) else bool(flags & _WRITES)
            if writes and not flags & os.O_EXCL:
                self._check(view, path, os.path.realpath)
        elif event in _CHANGES:
            for position, folder in _CHANGES[event]:
                path = arguments[position]
                if folder is not None and arguments[folder] != -1 and isinstance(path, (str, bytes)):
                    path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), os.fsdecode(path))
                self._check(view, path, real_entry)

    @staticmethod
    def _check(view: FileView, path: Any, resolve: Any) -> None:
        if not isinstance(path, (str, bytes)):
            return
        real = resolve(os.path.abspath(os.fsdecode(path)))
        status = status_of(real, follow=False)
        if status is None or not view.is_protected(real) or view.owns(real):
            return
        if resolve is os.path.realpath and not os.path.isfile(real):
            return  # a pipe, or a folder, which cannot be opened for writing
        raise PermissionError(f"a dry run changes no file that exists: {real}")


guard = FileGuard()
