"""Files to import that are unreadable, packed, damaged, or made to fill a disk or the
memory."""

from __future__ import annotations

import gzip
import os
import sys
import textwrap
from pathlib import Path

import pytest

from ebbtide.features.importers.source import Source, SourceError
from tests.conftest import run_process, slow_case

MIB = 2**20


def bomb(path: Path, mebibytes: int) -> Path:
    """Write a gzip file of a few kilobytes that unpacks to so many MiB of zeros."""
    block = gzip.compress(bytes(64 * MIB), 9)
    path.write_bytes(block * (mebibytes // 64))
    return path


def refused(path: Path) -> str:
    with pytest.raises(SourceError) as error:
        Source(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def read_bytes(path: Path) -> int:
    """Return the number of unpacked bytes."""
    with Source(path).open() as file:
        return sum(len(block) for block in iter(lambda: file.read(MIB), b""))


def refused_to_the_end(path: Path) -> str:
    with pytest.raises(SourceError) as error:
        read_bytes(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_source__gives_the_reason_for_unreadable_files(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'} does not exist"
    assert "is a folder: name the files in it" in refused(tmp_path)
    assert "File name too long" in refused(tmp_path / ("x" * 300))
    (tmp_path / "empty").touch()
    assert refused(tmp_path / "empty") == f"{tmp_path / 'empty'} is empty"
    (tmp_path / "nothing.gz").write_bytes(gzip.compress(b""))
    assert "is empty" in refused(tmp_path / "nothing.gz")
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device" in refused(tmp_path / "pipe")
    assert "is a pipe or a device" in refused(Path("/dev/zero"))
    os.symlink(tmp_path / "gone", tmp_path / "link")
    assert "does not exist" in refused(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_source__refuses_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    (tmp_path / "x").chmod(0)
    assert "Permission denied" in refused(tmp_path / "x")


def test_source__has_the_same_contents_packed_or_not(tmp_path: Path) -> None:
    text = (
        "\ufeffone\r\ntwo\rthree\n".encode()
        + b"\xff"
        + os.urandom(100_000).hex().encode()
    )
    (tmp_path / "plain").write_bytes(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text))
    # gzip files may be put one after another.
    (tmp_path / "members").write_bytes(
        gzip.compress(text[:5000]) + gzip.compress(text[5000:])
    )
    plain, *others = (
        Source(tmp_path / name) for name in ("plain", "packed", "members")
    )
    for source in others:
        assert source.head == plain.head == text[: 1 << 16]
        with source.open() as file:
            assert file.read() == text
        with source.text() as lines, plain.text() as expected:
            assert list(lines) == list(expected)
    with plain.text() as lines:
        assert [next(lines) for _ in range(3)] == ["one\n", "two\n", "three\n"]
    assert plain.size == len(text)


def test_open__refuses_a_cut_or_damaged_gzip_file(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(200_000).hex().encode())
    file = tmp_path / "x.gz"
    for contents in (
        packed[:-1],
        packed[: len(packed) // 2],
        packed[:5],
        packed[:-4] + b"\0\0\0\0",
    ):
        file.write_bytes(contents)
        assert "is damaged or in another format" in refused_to_the_end(file)
    file.write_bytes(
        packed[: len(packed) // 2] + b"\xff" * 100 + packed[len(packed) // 2 + 100 :]
    )
    assert "is damaged" in refused_to_the_end(file)


def test_open__refuses_a_file_that_unpacks_without_end(tmp_path: Path) -> None:
    file = bomb(tmp_path / "x.gz", 256)
    assert file.stat().st_size < MIB
    assert "unpacks to more than 400 times its size" in refused_to_the_end(file)


def test_open__does_not_limit_the_ratio_of_small_files(tmp_path: Path) -> None:
    assert read_bytes(bomb(tmp_path / "x.gz", 64)) == 64 * MIB


def test_damaged__is_one_short_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    error = Source(tmp_path / "x").damaged("a\nb " + "c" * 1000)
    assert "\n" not in str(error)
    assert len(str(error)) < len(str(tmp_path)) + 300


BIG = """
import sys
from pathlib import Path
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from tests.process_sizes import process_bytes

file, small, format, out = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
import_trace([small], out)
before = process_bytes("VmHWM")
try:
    import_trace([file], out, format, force=True)
except SourceError as error:
    print(error)
print(process_bytes("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("start", "unit", "format", "says"),
    [
        slow_case("DeepSpeed ", "x", "deepspeed-log", "has neither timers"),
        pytest.param(
            "DeepSpeed time (ms) |",
            " | a: 1",
            "deepspeed-log",
            "has neither timers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "DeepSpeed ",
            "\0",
            "deepspeed-log",
            "has neither timers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "[2024-04-15 10:00:00,000] json = {",
            '"a": {',
            "deepspeed-log",
            "has neither",
            marks=pytest.mark.slow,
        ),
        ("timestamp,gpu,mem_used\n", "1,2,", "nvml-monitor", "is not a table of text"),
        pytest.param(
            "# gpu fb\n# Idx MB\n",
            " 0 5",
            "nvml-monitor",
            "is not a table of text",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_import_trace__a_line_of_200_mb_does_not_fill_the_memory(
    tmp_path: Path, start: str, unit: str, format: str, says: str
) -> None:
    file, small = tmp_path / "big", tmp_path / "small"
    small.write_text("timestamp,gpu,mem_used\n1713142360,0,5\n")
    block = unit.encode() * (MIB // len(unit))
    with open(file, "wb") as out:
        out.write(start.encode())
        for _ in range(200):
            out.write(block)
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(BIG),
        file,
        small,
        format,
        tmp_path / "x.ebb",
    ]
    run = run_process(command)
    file.unlink()
    assert run.returncode == 0, run.stderr
    said, grown = run.stdout.splitlines()
    assert says in said
    assert int(grown) < 60 * MIB


def test_parsed__calls_a_parser_once_per_file(tmp_path: Path) -> None:
    calls = []

    def parse(source: Source) -> int:
        calls.append(source)
        return len(source.head)

    for name in ("x", "yy"):
        (tmp_path / name).write_text(name)
    sources = [Source(tmp_path / name) for name in ("x", "yy")]
    assert [source.parsed(parse) for source in sources * 2] == [1, 2, 1, 2]
    assert calls == sources
