"""Encodings and packings of files: each has the contents of the plain file."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace.schema import TABLES
from tests.features.importers.kineto.made_kineto import iteration, write_trace

LOG = "".join(
    f"[2026-03-16 10:00:{step:02d},000] [Rank 0] time (ms) | "
    "fwd: 400.00 | bwd: 500.00 | step: 50.00\n"
    for step in range(10)
)
CSV = "timestamp, index, memory.used [MiB]\n" + "".join(
    f"2025/10/26 12:00:{n:02d}.000, 0, {n} MiB\n" for n in range(10)
)


def zipped(data: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._x", b"finder")
        for name in names or ("run/trace",):
            archive.writestr(name, data)
    return file.getvalue()


def tarred(data: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names or ("run/trace",):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: bytes(pa.compress(data, "zstd", asbytes=True)),
    "zip": zipped,
    "tar": tarred,
    "tar.gz": lambda data: gzip.compress(tarred(data)),
    "zip of gz": lambda data: zipped(gzip.compress(data)),
    # Names that lead outside write nothing.
    "zip outside": lambda data: zipped(data, "/../../x"),
    "tar outside": lambda data: tarred(data, "../../x"),
}
ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "utf-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: text.encode("utf-16"),
    "utf-16-le": lambda text: text.encode("utf-16-le"),
    "utf-16-be": lambda text: text.encode("utf-16-be"),
    "hole": lambda text: bytes(200_000) + text.encode(),
    "hole within": lambda text: text.replace("\n", "\n" + "\0" * 999, 3).encode(),
    "colours": lambda text: text.replace(":", "\x1b[1;32m:\x1b[0m", 40).encode(),
    "titles": lambda text: ("\x1b]0;title\x07" + text).encode(),
    "carriage returns": lambda text: text.replace("\n", "\r").encode(),
    "windows": lambda text: text.replace("\n", "\r\n").encode(),
    "no end": lambda text: text.rstrip("\n").encode(),
}


def read_all(file: Path) -> None:
    with Source(file).open() as stream:
        while stream.read(1 << 20):
            pass


def tables(contents: bytes, folder: Path, name: str) -> list[object]:
    file = folder / name
    file.write_bytes(contents)
    before = sorted(folder.rglob("*"))
    trace = import_trace([file], folder / "out" / "t.ebb", force=True)
    rows = [trace.table(0, table).to_dict("list") for table in TABLES]
    outside = {path for path in folder.rglob("*") if folder / "out" not in path.parents}
    assert outside <= {*before, folder / "out"}
    return rows


@pytest.mark.parametrize("packing", PACKINGS)
def test_import__reads_every_packing(tmp_path: Path, packing: str) -> None:
    events = [event for n in range(6) for event in iteration(n, n * 100.0)]
    kineto = write_trace(tmp_path / "k.json", events).read_bytes()
    packed = PACKINGS[packing](kineto)
    assert tables(packed, tmp_path, "k.json") == tables(kineto, tmp_path, "k.json")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", [LOG, CSV], ids=["log", "csv"])
def test_import__reads_every_encoding(tmp_path: Path, text: str, encoding: str) -> None:
    plain = tables(text.encode(), tmp_path, "x.txt")
    assert tables(ENCODINGS[encoding](text), tmp_path, "x.txt") == plain


def test_import__takes_the_only_trace_of_an_archive(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("README.md", "a run")
        archive.writestr("job.log", LOG)
    plain = tables(LOG.encode(), tmp_path, "x")
    assert tables(file.getvalue(), tmp_path, "x") == plain
    (tmp_path / "two.zip").write_bytes(zipped(LOG.encode(), "a.log", "b.log"))
    with pytest.raises(SourceError, match="2 files to import among 2: unpack it"):
        import_trace([tmp_path / "two.zip"], tmp_path / "t.ebb")


@pytest.mark.parametrize("packing", ["gz", "zip", "zst", "tar.gz"])
def test_source__refuses_what_unpacks_without_end(tmp_path: Path, packing: str) -> None:
    file = tmp_path / "bomb"
    file.write_bytes(PACKINGS[packing](bytes(128 << 20)))
    with pytest.raises(SourceError, match="more than 400 times its size"):
        read_all(file)


@pytest.mark.parametrize("packing", PACKINGS)
def test_source__refuses_cut_files_in_one_line(tmp_path: Path, packing: str) -> None:
    packed = PACKINGS[packing](LOG.encode())
    file = tmp_path / "x"
    for length in (len(packed) // 2, len(packed) - 7):
        file.write_bytes(packed[:length])
        with contextlib.suppress(SourceError):
            read_all(file)
