"""`ebbtide import`, end to end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.cli import run
from tests.cli.test_bad_input import contents, refused
from tests.conftest import Run

DATA = Path(__file__).with_name("data")
PUBLISHED = (
    Path(__file__).parents[4]
    / "shared"
    / "published"
    / "deep-optimizer-states"
    / "h100-20B"
)
LAUNCHER = DATA / "deepspeed-0.19.8-zero3-launcher.log"
START = 1_713_142_360 * 10**9
MONITOR = "timestamp,gpu,mem_used,mem_free,rxpci [MiB/s],txpci [MiB/s]\n" + "".join(
    f"{START + n * 10**9},{gpu},{n * 10**9},{(80 - n) * 10**9},{n},0\n"
    for n in range(9)
    for gpu in (0, 1)
)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Run]:
    """Return a function that runs a command line in this process."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str | Path) -> Run:
        status = run([str(argument) for argument in arguments])
        return Run(arguments, status, *capsys.readouterr())

    return run_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.log").write_bytes(LAUNCHER.read_bytes())
    (tmp_path / "m.csv").write_text(MONITOR)
    (tmp_path / "m.csv.gz").write_bytes(gzip.compress(MONITOR.encode()))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(MONITOR.encode())[:-9])
    (tmp_path / "bare.csv").write_text("2024/04/15 00:52:40.000, 0, 5 MiB\n")
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night.\n")
    (tmp_path / "quiet.log").write_text("DeepSpeed said nothing.\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    return tmp_path


# (command line, part of its error message)
BAD = [
    ("import", "SOURCE"),
    ("import run.log", "-o"),
    ("import nowhere.log -o x.ebb", "nowhere.log does not exist"),
    ("import folder -o x.ebb", "folder has no file to import: it contains nothing"),
    ("import empty -o x.ebb", "is empty"),
    ("import novel.txt -o x.ebb", "nvml-monitor, megatron-log, deepspeed-log"),
    (
        "import novel.txt --format deepspeed-log -o x.ebb",
        "turn on wall_clock_breakdown",
    ),
    ("import quiet.log -o x.ebb", "turn on wall_clock_breakdown"),
    ("import run.log --format log -o x.ebb", "'log' is not a format: choose one of"),
    ("import run.log --format nvml-monitor -o x.ebb", "has no header with a timestamp"),
    ("import m.csv --format deepspeed-log -o x.ebb", "turn on wall_clock_breakdown"),
    ("import bare.csv -o x.ebb", "not csv,noheader"),
    ("import cut.gz -o x.ebb", "cut.gz is damaged"),
    (
        "import run.log m.csv -o x.ebb",
        "run.log has no dates, so it cannot be combined with other files",
    ),
    ("import run.log run.log -o x.ebb", "two DeepSpeed logs"),
    ("import m.csv m.csv -o x.ebb", "cover the same devices"),
    ("import m.csv -o file", "exists already"),
    ("import m.csv -o file --force", "replaces only traces"),
    ("import m.csv -o file/x.ebb", "cannot write"),
    ("import m.csv -o x.ebb --capacity lots", "'lots' is not a size"),
    (
        "import m.csv -o x.ebb --capacity 80",
        "--capacity 80 B is less than the 7.45 GiB that were in use on cuda:0",
    ),
    (
        "import m.csv -o x.ebb --link 7x16",
        "'7x16' is not a link: write generation x lanes, e.g. 5x16",
    ),
    ("import m.csv -o x.ebb --link 5x3", "5x16"),
    ("import m.csv -o x.ebb --nonsense", "--nonsense"),
]


@pytest.mark.parametrize(("command_line", "message"), BAD)
def test_import__bad_input_is_one_line_and_changes_no_file(
    folder: Path, command_line: str, message: str, command: Callable[..., Run]
) -> None:
    before = contents(folder)
    assert message in refused(command(*command_line.split()))
    assert contents(folder) == before


@pytest.mark.skipif(
    not PUBLISHED.exists(),
    reason="the published measurements are not here (shared/published)",
)
def test_import__a_published_run_up_to_its_windows(
    tmp_path: Path, command: Callable[..., Run]
) -> None:
    log = next(PUBLISHED.glob("*ratio0.5*prefetch1*.log"))
    files = [log, log.with_name(f"{log.stem}-monitor.csv")]
    done = command("import", *files, "-o", tmp_path / "x.ebb", "--link", "5x16")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    summary = json.loads(command("summary", tmp_path / "x.ebb", "--json").stdout)
    assert (summary["iterations"], summary["ranks"], summary["memory"]["pool"]) == (
        10,
        4,
        "device",
    )
    assert all(
        value is not None for phase in summary["phases"] for value in phase.values()
    )
    windows = json.loads(
        command("windows", tmp_path / "x.ebb", "--json", "--min-bytes", "8GiB").stdout
    )
    assert {w["rank"] for w in windows["windows"]} == {0, 1, 2, 3}
    assert all(
        w[f"{direction}_idle_share"] is not None
        for w in windows["windows"]
        for direction in ("h2d", "d2h")
    )
