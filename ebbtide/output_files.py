"""Output that stands whole at its path, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ebbtide.errors import UserError


@contextlib.contextmanager
def new_output(path: Path, force: bool, ours: Callable[[Path], bool], kind: str) -> Iterator[Path]:
    """Yield a path for the block to write a file or a folder to; when it ends that takes its place at `path`. If the
    block raises, all is as it was.

    force: replace what stands at `path`, if it is `ours`; kind says in words what that is. Raises UserError where
    something stands there, or nothing can be written.
    """
    if os.path.lexists(path):
        if not force:
            raise UserError(f"{path} exists already: choose another path, or replace it with --force")
        if not ours(path):
            raise UserError(f"{path} is not {kind}: --force replaces only that, choose another path")
    try:
        # In the same folder, so that it is the same file system: only there is a rename one step.
        aside = Path(tempfile.mkdtemp(prefix=".ebbtide-", dir=path.parent))
        try:
            yield aside / "new"
            _replace(path, aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, aside: Path) -> None:
    """A file is replaced in one step; a folder has to move away first, and comes back if that goes wrong."""
    if path.is_dir():
        os.replace(path, aside / "old")
    try:
        os.replace(aside / "new", path)
    except OSError:
        if os.path.lexists(aside / "old"):
            os.replace(aside / "old", path)
        raise
