"""Copies a recording to a URL while its job runs, and its traces at the end."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyarrow import fs

from ebbtide.errors import TraceError, UserError
from ebbtide.features.remote.file_systems import arrow_path
from ebbtide.features.remote.files import repeated
from ebbtide.profiler.trace.files import LOCK, META
from ebbtide.profiler.trace.schema import SPOOL
from ebbtide.profiler.trace.trace import Trace
from ebbtide.urls import Url

# Between two copies of a recording that goes on.
_PERIOD_S = float(os.environ.get("EBBTIDE_UPLOAD_SECONDS", "30"))
# Spools grow only: each copy is a file with what was added, named by where it begins.
_GROWING = ".spool"
_PART_BYTES = 64 << 20


class Upload:
    """The copy at a URL of the recording in a folder of this machine."""

    def __init__(self, url: Url, folder: Path, force: bool) -> None:
        self._url, self._folder, self._force = url, folder, force
        self._copied: dict[str, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Write the metadata, so that the recording opens, and copy from now on.

        Raises TraceError where something is there, or nothing can be written.
        """
        system, path = arrow_path(self._url)
        present = repeated(
            lambda: system.get_file_info(f"{path}/{META}").type, self._url
        )
        if present == fs.FileType.File:
            if not self._force:
                raise TraceError(
                    f"{self._url} exists already: choose another -o, or replace it "
                    "(--force)"
                )
            _delete(self._url)
        self._copy()
        self._thread.start()

    def finish(self, traces: Sequence[Trace]) -> list[Trace]:
        """Upload finished traces, delete those here, and return those at the URL.

        Raises UserError, and keeps them here, where they cannot be uploaded.
        """
        self._ended.set()
        self._thread.join()
        if not traces:
            _delete(self._url)
        uploaded = [self._upload(trace) for trace in traces]
        for trace in traces:
            shutil.rmtree(trace.path, ignore_errors=True)
        return uploaded

    def _upload(self, trace: Trace) -> Trace:
        target = self._url.with_name(trace.path.name)
        if trace.meta.state == "recording":
            self._copy()
            return Trace(target, trace.raw_meta, trace.columns, trace.labels)
        # The metadata come last: until then the spools count.
        for file in sorted(trace.path.rglob("*"), key=lambda path: path.name == META):
            if file.is_file() and file.name != LOCK:
                write(target / file.relative_to(trace.path), file.read_bytes())
        _delete(target / SPOOL)
        return Trace(target, trace.raw_meta, trace.columns, trace.labels)

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                self._copy()
            except (OSError, UserError):
                # The next copy has what this one lacks.
                continue

    def _copy(self) -> None:
        spools = sorted((self._folder / SPOOL).glob("*"))
        for file in (*spools, self._folder / META):
            if file.name == LOCK or not file.is_file():
                continue
            name = str(file.relative_to(self._folder))
            status = file.stat()
            state = status.st_size, status.st_mtime_ns
            if self._copied.get(name) == state:
                continue
            if file.suffix == _GROWING:
                begin, _ = self._copied.get(name, (0, 0))
                for offset, part in _parts(file, begin, status.st_size):
                    write(self._url / f"{name}@{offset:015d}", part)
                    self._copied[name] = offset + len(part), 0
            else:
                write(self._url / name, file.read_bytes())
            self._copied[name] = state


def _parts(file: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    with open(file, "rb") as opened:
        for offset in range(begin, end, _PART_BYTES):
            opened.seek(offset)
            yield offset, opened.read(min(_PART_BYTES, end - offset))


def write(url: Url, content: bytes) -> None:
    """Write a file as a whole. Raises TraceError."""
    system, path = arrow_path(url)

    def request() -> None:
        with system.open_output_stream(path) as stream:
            stream.write(content)

    repeated(request, url, "written")


def _delete(folder: Url) -> None:
    system, path = arrow_path(folder)

    def request() -> None:
        selected = fs.FileSelector(path, allow_not_found=True, recursive=True)
        for info in system.get_file_info(selected):
            if info.type == fs.FileType.File:
                system.delete_file(info.path)

    repeated(request, folder, "deleted")


def copy_spools(url: Url, folder: Path) -> None:
    """Copy the spools and the metadata of a recording to a folder of this machine."""
    system, path = arrow_path(url)

    def request() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / SPOOL).mkdir(parents=True)
        selected = fs.FileSelector(f"{path}/{SPOOL}", allow_not_found=True)
        files = [info.path for info in system.get_file_info(selected)]
        # Parts of a spool in their order.
        for file in [f"{path}/{META}", *sorted(files)]:
            name = file.removeprefix(f"{path}/").partition("@")[0]
            with system.open_input_file(file) as stream:
                content = stream.read()
            with open(folder / name, "ab") as copy:
                copy.write(content)

    repeated(request, url)
