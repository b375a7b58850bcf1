"""The traces of `traces/`: every command reads them, and converting the published files
gives them again."""

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
from ebbtide.profiler.trace import open_trace
from ebbtide.profiler.trace.schema import TABLES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "traces"
TRACES = sorted(FOLDER.glob("*.ebb"))
PUBLISHED = ROOT.parent / "shared" / "published"


def traces(but: Collection[str]) -> pytest.MarkDecorator:
    """Parametrize a test by all traces; those that are not in `but` are slow, since
    only their figures differ."""
    paths = [
        pytest.param(
            path, marks=[] if path.stem in but else pytest.mark.slow, id=path.stem
        )
        for path in TRACES
    ]
    return pytest.mark.parametrize("trace", paths)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command line in this process and returns its exit
    status, stdout and stderr."""

    def run_command(*arguments: str | Path) -> tuple[int, str, str]:
        status = run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_command


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    pytest.importorskip("ebbtide.features.importers", reason="its feature is not there")
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


# Other tests of tests/cli/ run the commands that read traces on each of them.
@traces(but=["a100-torch-profiler"])
def test_replay__simulates_every_policy_where_the_job_is_known(
    command: Command, trace: Path
) -> None:
    machine = (
        "a100-40gb-published"
        if trace.stem.startswith("a100")
        else "h100-80gb-sxm-published"
    )
    status, out, err = command("replay", trace, "--machine", machine, "--json")
    if trace.stem == "a100-torch-profiler":
        assert (status, out, err.count("\n")) == (2, "", 1)
    else:
        assert status == 0, err
        replay = json.loads(out)
        fitting = {
            result["policy"]: result["iteration_ms"]
            for result in replay["results"]
            if result["fits"]
        }
        assert min(fitting.values()) >= replay["bound"]["iteration_ms"] * (1 - 1e-9)
        assert fitting["adaptive"] == min(fitting.values())


@traces(but=["a100-13b-async"])
@pytest.mark.skipif(
    not PUBLISHED.is_dir(),
    reason="the published measurements are not here (shared/published)",
)
def test_convert__gives_the_same_trace_again(
    converter: ModuleType, trace: Path, tmp_path: Path
) -> None:
    (published_run,) = (r for r in converter.published_runs() if r.name == trace.stem)
    again = open_trace(converter.convert(published_run, PUBLISHED, tmp_path))
    shipped = open_trace(trace)
    assert again.meta == shipped.meta
    for rank in shipped.ranks:
        for table in TABLES:
            pd.testing.assert_frame_equal(
                again.table(rank, table), shipped.table(rank, table)
            )
