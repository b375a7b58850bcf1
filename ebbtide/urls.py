"""URLs of traces, in the place of paths."""

from __future__ import annotations

import re
from errno import ENOTSUP
from pathlib import Path, PosixPath
from typing import NoReturn

_URL = re.compile(r"(?:s3|gs|hf|https?):/{1,2}[^/]")


class Url(PosixPath):
    """A URL of a trace or of one of its files. Its methods that the file system of this
    machine answers for paths make no request."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def exists(self) -> bool:
        """Return True: who reads it is told where it is not."""
        return True

    def is_dir(self) -> bool:
        """Return True: traces are folders, and other files are not read from URLs."""
        return True

    def is_file(self) -> bool:
        return False

    def iterdir(self) -> NoReturn:
        raise OSError(ENOTSUP, "its files cannot be listed: copy them here first")

    def resolve(self, strict: bool = False) -> Url:
        return self


def with_urls(value: object) -> object:
    """Return an argument of a command with `Url` for each path that is one."""
    if isinstance(value, list):
        return [with_urls(item) for item in value]
    return location(value) if isinstance(value, Path) else value


def location(path: str | Path) -> Path:
    """Return a path, or the URL that it is. Paths have one slash after the scheme."""
    return Url(path) if _URL.match(str(path)) else Path(path)
