"""`ebbtide import`, end to end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.cli import run
from ebbtide.profiler.trace import open_trace
from tests.cli.test_bad_input import contents, refused
from tests.conftest import Run, ebbtide_in_process

DATA = Path(__file__).with_name("data")
PUBLISHED = Path(__file__).parents[4] / "shared" / "published" / "deep-optimizer-states" / "h100-20B"
LAUNCHER = DATA / "deepspeed-0.19.8-zero3-launcher.log"
START = 1_713_142_360 * 10**9
MONITOR = "timestamp,gpu,mem_used,mem_free,rxpci [MiB/s],txpci [MiB/s]\n" + "".join(
    f"{START + n * 10**9},{gpu},{n * 10**9},{(80 - n) * 10**9},{n},0\n" for n in range(9) for gpu in (0, 1)
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Run]:
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
    ("import novel.txt --format deepspeed-log -o x.ebb", "turn on wall_clock_breakdown"),
    ("import quiet.log -o x.ebb", "turn on wall_clock_breakdown"),
    ("import run.log --format log -o x.ebb", "'log' is not a format: choose one of"),
    ("import run.log --format nvml-monitor -o x.ebb", "has no header with a timestamp"),
    ("import m.csv --format deepspeed-log -o x.ebb", "turn on wall_clock_breakdown"),
    ("import bare.csv -o x.ebb", "not csv,noheader"),
    ("import cut.gz -o x.ebb", "cut.gz is damaged"),
    ("import run.log m.csv -o x.ebb", "run.log has no dates, so it cannot be combined with other files"),
    ("import run.log run.log -o x.ebb", "two DeepSpeed logs"),
    ("import m.csv m.csv -o x.ebb", "cover the same devices"),
    ("import m.csv -o file", "exists already"),
    ("import m.csv -o file --force", "replaces only traces"),
    ("import m.csv -o file/x.ebb", "cannot write"),
    ("import m.csv -o x.ebb --capacity lots", "'lots' is not a size"),
    ("import m.csv -o x.ebb --capacity 80", "--capacity 80 B is less than the 7.45 GiB that were in use on cuda:0"),
    ("import m.csv -o x.ebb --link 7x16", "'7x16' is not a link: write generation x lanes, e.g. 5x16"),
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


def test_import__a_bad_file_exits_with_2(folder: Path) -> None:
    assert "turn on wall_clock_breakdown" in refused(
        ebbtide_in_process("import", "quiet.log", "-o", "x.ebb", cwd=folder)
    )


def test_import__a_log_up_to_its_windows(folder: Path) -> None:
    done = ebbtide_in_process("import", "run.log", "-o", "x.ebb", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    *notes, written, recorded, last = done.stderr.splitlines()
    assert [note.removeprefix("ebbtide: ") for note in notes] == open_trace(folder / "x.ebb").notes
    assert written == "ebbtide: trace: x.ebb, 2 iterations on 2 ranks"
    assert recorded.startswith("ebbtide: recorded: phases")
    assert last == "ebbtide: next: ebbtide summary x.ebb"
    summary = json.loads(ebbtide_in_process("summary", "x.ebb", "--json", cwd=folder).stdout)
    assert (summary["iterations"], summary["warmup_iterations"], summary["ranks"]) == (2, 0, 2)
    assert summary["memory"]["pool"] == "allocated"
    assert summary["memory"]["capacity_bytes"] is None
    for phase in summary["phases"]:
        assert phase["min_free_bytes"] is phase["h2d_bytes"] is phase["d2h_bytes"] is None
    assert summary["transfers"] == {
        direction: {"count": None, "bytes": None, "busy_ms": None} for direction in ("h2d", "d2h")
    }
    unknown = json.loads(ebbtide_in_process("windows", "x.ebb", "--json", cwd=folder).stdout)
    assert unknown["windows"] == []
    assert any("pass --capacity to `ebbtide import`" in line for line in unknown["missing"])
    # With the capacity given there are windows of rank 0, the only one whose memory is in the log.
    again = ebbtide_in_process("import", "run.log", "-o", "x.ebb", "--capacity", "1GiB", "--force", cwd=folder)
    assert "capacity" not in again.stderr
    windows = json.loads(ebbtide_in_process("windows", "x.ebb", "--json", "--min-bytes", "500MiB", cwd=folder).stdout)
    assert windows["capacity_bytes"] == 2**30
    assert {w["rank"] for w in windows["windows"]} == {0}
    assert {w["iteration"] for w in windows["windows"]} == {0, 1}
    assert all(w["h2d_idle_share"] is None and w["d2h_idle_share"] is None for w in windows["windows"])
    assert all(2**30 - w["free_bytes"] >= 0.37 * 2**30 for w in windows["windows"])


@pytest.mark.parametrize(
    ("options", "peak"),
    [("", None), ("--link 5x16", 63.0e9), ("--link gen4X8", 15.75e9), ("--link 3x16 --capacity 90GB", 15.75e9)],
)
def test_import__a_monitor_file_with_and_without_its_link(
    folder: Path, options: str, peak: float | None, command: Callable[..., Run]
) -> None:
    done = command("import", "m.csv.gz", "-o", "x.ebb", *options.split())
    assert done.returncode == 0, done.stderr
    assert ("import with --link" in done.stderr) == (peak is None)
    device = open_trace(folder / "x.ebb").rank(1).devices[0]
    assert device.capacity_bytes == (90 if "90GB" in options else 80) * 10**9
    windows = json.loads(command("windows", "x.ebb", "--json", "--min-bytes", "1GB").stdout)
    assert {w["rank"] for w in windows["windows"]} == {0, 1}
    for window in windows["windows"]:
        assert window["iteration"] is window["phase"] is None
        if peak is None:
            assert window["h2d_idle_share"] is window["d2h_idle_share"] is None
        else:
            assert device.link.peak_bytes_per_s == pytest.approx(peak, rel=2e-3)
            assert 0.99 < window["h2d_idle_share"] < 1.0 == window["d2h_idle_share"]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here (shared/published)")
def test_import__a_published_run_up_to_its_windows(tmp_path: Path, command: Callable[..., Run]) -> None:
    log = next(PUBLISHED.glob("*ratio0.5*prefetch1*.log"))
    files = [log, log.with_name(f"{log.stem}-monitor.csv")]
    done = command("import", *files, "-o", tmp_path / "x.ebb", "--link", "5x16")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    summary = json.loads(command("summary", tmp_path / "x.ebb", "--json").stdout)
    assert (summary["iterations"], summary["ranks"], summary["memory"]["pool"]) == (10, 4, "device")
    assert all(value is not None for phase in summary["phases"] for value in phase.values())
    windows = json.loads(command("windows", tmp_path / "x.ebb", "--json", "--min-bytes", "8GiB").stdout)
    assert {w["rank"] for w in windows["windows"]} == {0, 1, 2, 3}
    assert all(w[f"{direction}_idle_share"] is not None for w in windows["windows"] for direction in ("h2d", "d2h"))


def test_import__help_lists_the_options() -> None:
    shown = ebbtide_in_process("import", "--help").stdout
    assert all(word in shown for word in ("SOURCE...", "--format", "--capacity", "--link", "--force"))
