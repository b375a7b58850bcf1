"""`ebbtide plot` as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.plot.pictures import GPU, LINKED, MIB, train
from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide, ebbtide_in_process

SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    builder = TraceBuilder()
    for number in range(2):
        rank = train(builder.rank(number, devices=[LINKED]), size=(60 - number) * MIB)
        rank.transfer("h2d", 10**6, 2 * 10**6, 10**7).memory(0, MIB, "rss", "cpu")
    builder.write(folder / "run.ebb")
    unlinked = TraceBuilder()
    train(unlinked.rank(0, devices=[GPU]))
    unlinked.write(folder / "unlinked.ebb")
    return folder


@pytest.mark.parametrize("format", list(SIGNATURES))
@pytest.mark.parametrize("kind", ["both", "memory", "link", "windows"])
def test_every_kind_is_drawn_in_every_format(place: Path, kind: str, format: str) -> None:
    output = f"{kind}.{format}"
    run = ebbtide_in_process("plot", "run.ebb", "-o", output, "--kind", kind, "--min-bytes", "45MiB", cwd=place)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", f"ebbtide: {output}\n")
    assert (place / output).read_bytes().startswith(SIGNATURES[format])


def test_options_reach_the_picture(place: Path) -> None:
    chosen = ("--rank", "1", "--iterations", "1:3", "--kind", "windows", "--min-bytes", "41MiB")
    assert ebbtide_in_process("plot", "run.ebb", "-o", "chosen.SVG", *chosen, cwd=place).returncode == 0
    # Text is drawn as outlines; what it says stands in comments.
    said = re.findall(r"<!-- (.*?) -->", (place / "chosen.SVG").read_text())
    assert {"rank 1 · a GPU", "1", "2", "≥ 41.00 MiB free"} <= set(said)
    # 41 MiB of the 100 are free at the peak of 59.
    assert "41.00 MiB" in said


def test_a_picture_is_replaced_only_when_forced(place: Path) -> None:
    (place / "taken.png").write_text("kept")
    assert "--force" in refused(ebbtide_in_process("plot", "run.ebb", "-o", "taken.png", cwd=place))
    assert (place / "taken.png").read_text() == "kept"
    assert ebbtide("plot", "run.ebb", "unlinked.ebb", "-o", "taken.png", "--force", cwd=place).returncode == 0
    assert (place / "taken.png").read_bytes().startswith(SIGNATURES["png"])
    (place / "folder.png").mkdir()
    assert "not a file" in refused(ebbtide_in_process("plot", "run.ebb", "-o", "folder.png", "--force", cwd=place))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run.ebb unlinked.ebb -o x.png --kind link", "unlinked.ebb has no link to draw"),
        ("run.ebb -o x.png --kind tide", "tide"),
        ("run.ebb -o x.png --kind windows --min-bytes lots", "lots"),
        ("run.ebb -o x.png --rank 5", "has no rank 5: it has 0, 1"),
        ("run.ebb unlinked.ebb -o x.png --rank 1", "unlinked.ebb has no rank 1"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(place: Path, line: str, says: str) -> None:
    before = sorted(path.name for path in place.iterdir())
    assert says in refused(ebbtide_in_process("plot", *line.split(), cwd=place))
    assert sorted(path.name for path in place.iterdir()) == before
