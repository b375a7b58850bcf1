"""The traces of `traces/`: every command reads them, and converting the published files gives them again."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from ebbtide.cli import run
from ebbtide.phases import ITERATION_PARTS, PHASES
from ebbtide.profiler.trace import open_trace
from ebbtide.profiler.trace.schema import TABLES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "traces"
TRACES = sorted(FOLDER.glob("*.ebb"))
PUBLISHED = ROOT.parent / "shared" / "published"
SHOWN = {"h100-20b-ratio0.5-async", "a100-13b-async", "a100-torch-profiler"}


def traces(but: Collection[str]) -> pytest.MarkDecorator:
    """Parametrize a test by all traces; those that are not in `but` are slow."""
    paths = [pytest.param(path, marks=[] if path.stem in but else pytest.mark.slow, id=path.stem) for path in TRACES]
    return pytest.mark.parametrize("trace", paths)


# The others differ in their figures, not in their content.
one_of_each_kind = traces(but=SHOWN)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command line in this process and returns its exit status, stdout and stderr."""

    def run_command(*arguments: str | Path) -> tuple[int, str, str]:
        status = run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_command


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert", FOLDER / "convert.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["convert"] = module
    spec.loader.exec_module(module)
    return module


def test_traces__are_small_and_hold_no_command_line_of_others() -> None:
    files = [file for path in TRACES for file in path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 4e6
    for path in TRACES:
        meta = json.loads((path / "meta.json").read_text())
        assert not {"command", "cwd"} & set(meta)
        assert "/home/" not in json.dumps(meta)
        assert {"origin", "files"} <= set(meta["provenance"])


def test_traces__are_all_described_in_the_readme(converter: ModuleType) -> None:
    readme = (FOLDER / "README.md").read_text()
    for published_run in converter.published_runs():
        assert published_run.origin in readme
    names = sorted(published_run.name for published_run in converter.published_runs())
    assert names == [path.stem for path in TRACES]


@one_of_each_kind
def test_summary__names_device_and_phases(command: Command, trace: Path) -> None:
    status, out, _ = command("summary", trace, "--json")
    phases = {phase["phase"]: phase for phase in json.loads(out)["phases"]}
    assert status == 0
    assert all(phases[phase]["median_ms"] > 0 for phase in PHASES)
    status, out, _ = command("summary", trace)
    assert status == 0
    assert "100" in out.split("device: NVIDIA ")[1].splitlines()[0]


@one_of_each_kind
def test_windows__finds_free_memory_where_memory_was_recorded(command: Command, trace: Path) -> None:
    status, out, _ = command("windows", trace, "--json")
    assert status == 0
    answer = json.loads(out)
    windows = answer["windows"]
    if trace.stem == "a100-torch-profiler":
        assert (windows, len(answer["missing"])) == ([], 1)
    else:
        assert {window["phase"] for window in windows} == set(ITERATION_PARTS)
        idle = [window["h2d_idle_share"] is not None for window in windows]
        assert any(idle) == trace.stem.startswith("h100")


@one_of_each_kind
def test_findings__prints_one_object(command: Command, trace: Path) -> None:
    status, out, _ = command("findings", trace, "--json")
    assert status == 0
    rules = {finding["rule"] for finding in json.loads(out)["findings"]}
    assert ("cpu-bound-update" in rules) == (trace.stem.startswith("h100"))


@traces(but=["a100-13b-async"])
def test_plot_and_report__write_their_files(command: Command, trace: Path, tmp_path: Path) -> None:
    picture, page = tmp_path / "memory.png", tmp_path / "report.html"
    status, _, err = command("plot", trace, "-o", picture)
    assert status == 0, err
    assert picture.stat().st_size > 10_000
    status, _, err = command("report", trace, "-o", page)
    assert status == 0, err
    assert trace.stem in page.read_text()


@one_of_each_kind
def test_replay__simulates_every_policy_where_the_job_is_known(command: Command, trace: Path) -> None:
    machine = "a100-40gb-published" if trace.stem.startswith("a100") else "h100-80gb-sxm-published"
    status, out, err = command("replay", trace, "--machine", machine, "--json")
    if trace.stem == "a100-torch-profiler":
        assert (status, out, err.count("\n")) == (2, "", 1)
    else:
        assert status == 0, err
        replay = json.loads(out)
        fitting = {result["policy"]: result["iteration_ms"] for result in replay["results"] if result["fits"]}
        assert min(fitting.values()) >= replay["bound"]["iteration_ms"] * (1 - 1e-9)
        assert fitting["adaptive"] == min(fitting.values())


@traces(but=["a100-13b-async", "a100-torch-profiler"])
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published measurements are not here (shared/published)")
def test_convert__gives_the_same_trace_again(converter: ModuleType, trace: Path, tmp_path: Path) -> None:
    (published_run,) = (r for r in converter.published_runs() if r.name == trace.stem)
    again = open_trace(converter.convert(published_run, PUBLISHED, tmp_path))
    shipped = open_trace(trace)
    assert again.meta == shipped.meta
    for rank in shipped.ranks:
        for table in TABLES:
            pd.testing.assert_frame_equal(again.table(rank, table), shipped.table(rank, table))
