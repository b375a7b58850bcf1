"""A job that is ready for a dry run."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ebbtide.errors import UserError


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready for a dry run."""

    command: list[str]  # The words that start it
    # A folder that only the dry run reads, to be removed at its end; None: there is
    # none
    scratch: Path | None = None
    lines: list[str] = field(default_factory=list)  # For people: what runs


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed if the block raises."""
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        raise


def require(package: str, subject: str) -> None:
    """Raise UserError if a package is not installed that something, the subject,
    needs."""
    if find_spec(package) is None:
        raise UserError(
            f"{subject} needs {package}: pip install {package}, in the environment of "
            "ebbtide"
        )
