"""Writes output files and folders completely or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ebbtide.errors import UserError


@contextlib.contextmanager
def new_output(
    path: Path, force: bool, ours: Callable[[Path], bool], kind: str
) -> Iterator[Path]:
    """Yield a temporary path to write a file or a folder to.

    Move it to `path`, unless the block raises; folders above it are created. Raises
    UserError where something exists there (with `force`: that is not ours), or nothing
    can be written.
    """
    if os.path.lexists(path):
        if not force:
            raise UserError(
                f"{path} exists already: choose another path, or replace it with "
                "--force"
            )
        if not ours(path):
            raise UserError(
                f"{path} is not {kind}: --force replaces only that, choose another path"
            )
    try:
        with _folders_above(path):
            # In the same folder, so that it is on the same file system: only there a
            # rename is one step.
            temporary = Path(tempfile.mkdtemp(prefix=".ebbtide-", dir=path.parent))
            try:
                yield temporary / "new"
                _replace(path, temporary)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def _folders_above(path: Path) -> Iterator[None]:
    """Create the folders above a path, and remove them again if the block raises."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _replace(path: Path, temporary: Path) -> None:
    """Replace a file in one step, or a folder in two.

    The old folder is restored if the second step fails.
    """
    if path.is_dir():
        os.replace(path, temporary / "old")
    try:
        os.replace(temporary / "new", path)
    except OSError:
        if os.path.lexists(temporary / "old"):
            os.replace(temporary / "old", path)
        raise
