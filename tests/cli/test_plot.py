"""`ebbtide plot`, end to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.plot.pictures import GPU, LINKED, MIB, train
from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide_in_process, slow

SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("format", slow(SIGNATURES, but=["png"]))
@pytest.mark.parametrize(
    "kind", slow(["both", "memory", "link", "windows"], but=["link", "windows"])
)
def test_plot__writes_every_kind_in_every_format(
    folder: Path, kind: str, format: str
) -> None:
    output = f"{kind}.{format}"
    run = ebbtide_in_process(
        "plot",
        "run.ebb",
        "-o",
        output,
        "--kind",
        kind,
        "--min-bytes",
        "45MiB",
        cwd=folder,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", f"ebbtide: {output}\n")
    assert (folder / output).read_bytes().startswith(SIGNATURES[format])


def test_plot__applies_its_options(folder: Path) -> None:
    chosen = (
        "--rank",
        "1",
        "--iterations",
        "1:3",
        "--kind",
        "windows",
        "--min-bytes",
        "41MiB",
    )
    assert (
        ebbtide_in_process(
            "plot", "run.ebb", "-o", "chosen.SVG", *chosen, cwd=folder
        ).returncode
        == 0
    )
    # Text is drawn as outlines; the characters are in comments.
    texts = re.findall(r"<!-- (.*?) -->", (folder / "chosen.SVG").read_text())
    assert {
        "rank 1 · a GPU · free memory: capacity minus device",
        "1",
        "2",
        "≥ 41.00 MiB free",
    } <= set(texts)
    # 41 MiB of the 100 are free at the peak of 59.
    assert "41.00 MiB" in texts


def test_plot__replaces_a_picture_only_with_force(folder: Path) -> None:
    (folder / "taken.png").write_text("kept")
    assert "--force" in refused(
        ebbtide_in_process("plot", "run.ebb", "-o", "taken.png", cwd=folder)
    )
    assert (folder / "taken.png").read_text() == "kept"
    assert (
        ebbtide_in_process(
            "plot", "run.ebb", "unlinked.ebb", "-o", "taken.png", "--force", cwd=folder
        ).returncode
        == 0
    )
    assert (folder / "taken.png").read_bytes().startswith(SIGNATURES["png"])
    (folder / "folder.png").mkdir()
    assert "not a file" in refused(
        ebbtide_in_process("plot", "run.ebb", "-o", "folder.png", "--force", cwd=folder)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "run.ebb unlinked.ebb -o x.png --kind link",
            "unlinked.ebb has no link to draw",
        ),
        ("run.ebb -o x.png --kind tide", "tide"),
        ("run.ebb -o x.png --kind windows --min-bytes lots", "lots"),
        ("run.ebb -o x.png --rank 5", "has no rank 5: it has 0, 1"),
        ("run.ebb unlinked.ebb -o x.png --rank 1", "unlinked.ebb has no rank 1"),
    ],
)
def test_plot__bad_input_is_one_line(
    folder: Path, arguments: str, message: str
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert message in refused(
        ebbtide_in_process("plot", *arguments.split(), cwd=folder)
    )
    assert sorted(path.name for path in folder.iterdir()) == before
