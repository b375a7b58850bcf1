"""The file systems behind URLs: those of pyarrow, and those of fsspec."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Protocol

from pyarrow import fs

from ebbtide.errors import TraceError
from ebbtide.extras import require
from ebbtide.urls import Url

_CONNECT_S = 10.0
# Between two parts of an answer.
_READ_S = 10.0
_NOT_FOUND = 404


class Blob(Protocol):
    """A file at a URL."""

    def size(self) -> int:
        """Return its size in bytes."""

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Return a part of its contents."""


def blob(url: Url) -> Blob:
    """Open a file. Raises FileNotFoundError, and OSError or others where the request
    fails."""
    scheme, _, path = str(url).partition("://")
    if scheme in _ARROW:
        opened: Blob = arrow_file_system(scheme).open_input_file(path)
        return opened
    return _FsspecBlob(_fsspec(scheme), str(url) if scheme != "hf" else path)


class _FsspecBlob:
    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self._size: int | None = None

    def size(self) -> int:
        if self._size is None:
            try:
                self._size = self._system.info(self._path)["size"]
            except FileNotFoundError as error:
                # That of HTTP is this for every failure.
                status = getattr(error.__cause__, "status", _NOT_FOUND)
                if isinstance(error.__cause__, OSError) or status != _NOT_FOUND:
                    raise OSError(str(error.__cause__)) from None
                raise
        if self._size is None:
            raise OSError("the server does not say how large the file is")
        return self._size

    def read_at(self, nbytes: int, offset: int) -> bytes:
        if not nbytes:
            return b""
        part: bytes = self._system.cat_file(self._path, offset, offset + nbytes)
        # Some servers send the whole file.
        return part[offset : offset + nbytes] if len(part) == self.size() else part


def arrow_path(url: Url) -> tuple[fs.FileSystem, str]:
    """Return the file system of a URL that is written to or listed, and the path there.

    Raises TraceError for those that are only read.
    """
    scheme, _, path = str(url).partition("://")
    if scheme not in _ARROW:
        names = " or ".join(f"{name}://" for name in _ARROW)
        raise TraceError(
            f"{url}: {scheme}:// is read only, and lists no files: recordings are at "
            f"{names}"
        )
    return arrow_file_system(scheme), path


@cache
def arrow_file_system(scheme: str) -> fs.FileSystem:
    """Return pyarrow's file system of `s3` or `gs`."""
    return _ARROW[scheme]()


def _s3() -> fs.FileSystem:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL"
    )
    return fs.S3FileSystem(
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_S,
        request_timeout=_READ_S,
        # `files` repeats requests.
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        allow_delayed_open=True,
    )


def _gs() -> fs.FileSystem:
    return fs.GcsFileSystem()


_ARROW = {"s3": _s3, "gs": _gs}


@cache
def _fsspec(scheme: str) -> Any:
    fsspec = require("fsspec")
    if scheme == "hf":
        return fsspec.filesystem("hf")
    timeout = require("aiohttp").ClientTimeout(
        total=None, sock_connect=_CONNECT_S, sock_read=_READ_S
    )
    return fsspec.filesystem(scheme, client_kwargs={"timeout": timeout})
