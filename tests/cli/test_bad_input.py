"""Bad input to every command: one line on stderr, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.command import find_commands
from ebbtide.phases import PHASES
from ebbtide.profiler.agent.spool import Spool
from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import (
    Run,
    ebbtide,
    ebbtide_in_process,
    needs_all_features,
    run_process,
    slow_case,
)

LONG = "x" * 300
COMMANDS = [entry.name for entry in find_commands(None)]


def write_trace(path: Path, rank: int) -> None:
    """Write a small trace of three iterations."""
    builder = TraceBuilder("recorded", clock={"wall_offset_ns": 10**18 + rank})
    for number in range(3):
        for number_in_iteration, phase in enumerate(PHASES):
            start = 30 * number + 10 * number_in_iteration
            builder.rank(rank).phase(phase, start, start + 10, number).memory(
                start, 100 + start
            )
    builder.write(path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    for rank, name in enumerate(("a", "b", "torn", "newer")):
        write_trace(folder / f"{name}.ebb", rank)
    (folder / "torn.ebb" / "rank-2" / "memory.parquet").write_bytes(b"PAR1 torn")
    change(folder / "newer.ebb", schema=99)
    (folder / "file").write_text("kept")
    (folder / "folder").mkdir()
    (folder / "taken.png").write_text("kept")
    (folder / "deep").mkdir()
    (folder / "deep" / "meta.json").write_bytes(b"[" * 200_000)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A folder with two traces of one job, others that cannot be read, and files that
    are not traces."""
    return shutil.copytree(template, tmp_path / "folder")


def change(path: Path, **values: Any) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | values))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def refused(run: Run) -> str:
    """Assert that a command refused its input, and return its one line on stderr."""
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    (message,) = run.stderr.splitlines()
    assert message.startswith("ebbtide: ")
    return message


# (command line, part of its error message)
BAD: list[Any] = [
    ("--nonsense", "--nonsense"),
    ("nosuch a.ebb", "nosuch"),
    ("summary", "RUN.ebb"),
    ("summary a.ebb b.ebb", "b.ebb"),
    ("summary nowhere.ebb --json", "does not exist"),
    ("summary deep", "not a trace"),
    ("summary newer.ebb", "upgrade"),
    ("summary torn.ebb --json", "damaged"),
    (f"summary {LONG}", LONG),
    ("plot a.ebb", "-o"),
    ("plot -o x.png", "RUN.ebb"),
    ("plot a.ebb -o x.gif", ".png, .svg, .pdf"),
    ("plot a.ebb -o taken.png", "--force"),
    ("plot a.ebb -o file/x.png", "cannot write"),
    ("plot a.ebb -o x.png --iterations 9:", "it has 0 to 2"),
    ("plot a.ebb -o x.png --iterations 5:3", "5:3"),
    ("plot a.ebb -o x.png --iterations many", "many"),
    ("plot a.ebb -o x.png --rank first", "--rank"),
    ("plot a.ebb -o x.png --iterations=", ""),
    (f"plot a.ebb -o {LONG}.png", LONG),
    ("import a.ebb b.ebb", "-o"),
    ("import -o m.ebb", "SOURCE"),
    ("import a.ebb b.ebb -o b.ebb", "--force"),
    ("import a.ebb b.ebb -o file/m.ebb", "cannot write"),
    ("import a.ebb torn.ebb -o m.ebb", "damaged"),
    ("profile", "CMD"),
    ("profile -o p.ebb -- nosuchcommand", "cannot run nosuchcommand"),
    ("profile -o a.ebb -- true", "--force"),
    ("profile --force -o folder -- true", "replaces only traces"),
    pytest.param(
        "profile -o file/p.ebb -- true", "cannot write", marks=pytest.mark.slow
    ),
    pytest.param("profile --nonsense -- true", "--nonsense", marks=pytest.mark.slow),
    pytest.param(
        "profile -o p.ebb --max-size lots -- true", "lots", marks=pytest.mark.slow
    ),
    ("profile -o p.ebb --iterations 3:3 -- true", "3:3"),
    ("profile -o p.ebb --poll nan -- true", "--poll"),
    ("profile -o p.ebb --allocator-iterations 1.5 -- true", "--allocator-iterations"),
    pytest.param(
        "profile -o p.ebb --poll inf -- true", "--poll", marks=pytest.mark.slow
    ),
    pytest.param(
        "profile --force -o deep -- true", "only traces", marks=pytest.mark.slow
    ),
    slow_case("profile -o new/er/p.ebb -- nosuch", "cannot run"),
    slow_case("profile --force -o a.ebb -- nosuch", "cannot run"),
]


@pytest.mark.parametrize(("command_line", "message"), BAD)
def test_bad_input__is_one_line_and_changes_no_file(
    folder: Path, command_line: str, message: str
) -> None:
    before = contents(folder)
    # Recording takes over the signals of its process.
    run = (
        ebbtide
        if "nosuch" in command_line and command_line.startswith("profile")
        else ebbtide_in_process
    )
    assert message in refused(run(*command_line.split(), cwd=folder))
    assert contents(folder) == before


def test_profile__names_python_for_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    run = ebbtide("profile", "-o", "p.ebb", "--", "train.py", cwd=tmp_path)
    assert refused(run).endswith("cannot run train.py: it is a script: python train.py")


def test_profile__a_count_may_be_a_float(folder: Path) -> None:
    message = refused(
        ebbtide(
            "profile",
            "-o",
            "p.ebb",
            "--allocator-iterations",
            "5e0",
            "--",
            "nosuch",
            cwd=folder,
        )
    )
    assert "cannot run nosuch" in message


@pytest.mark.parametrize(
    "values",
    [
        {"notes": None},
        {"warmup_iterations": "two"},
        {
            "ranks": [
                {"rank": 0, "devices": [{"device": "cuda:0", "capacity_bytes": "much"}]}
            ]
        },
        {"state": "recording", "host": None},
    ],
    ids="-".join,
)
def test_summary__invalid_metadata_is_one_line(
    folder: Path, values: dict[str, Any]
) -> None:
    change(folder / "a.ebb", **values)
    (folder / "a.ebb" / "spool").mkdir()
    spool = Spool(str(folder / "a.ebb" / "spool" / "agent-here-1.spool"))
    spool.put_header(0, 1, 0)
    spool.close()
    assert "damaged" in refused(ebbtide_in_process("summary", "a.ebb", cwd=folder))


# In one process, in this order: what a command must not import, those before it must
# not either.
IMPORTS = {
    "--help": {"torch", "pandas", "matplotlib", "numpy", "pyarrow"},
    "summary a.ebb --json": {"torch", "matplotlib", "scipy", "bokeh"},
    "replay --params 1e9 --machine h100-80gb-sxm-published --policy pipelined": {
        "torch",
        "numba",
        "scipy",
        "bokeh",
    },
    # A search runs so many tasks that numba is worth its time, which imports scipy.
    "replay --params 1e9 --free-bytes 4GB --machine h100-80gb-sxm-published": {
        "torch",
        "matplotlib",
        "bokeh",
    },
    "import a.ebb b.ebb -o m.ebb": {"torch", "matplotlib"},
    "plot a.ebb -o x.png": {"torch"},
}


@needs_all_features
def test_imports__a_command_imports_only_what_it_needs(folder: Path) -> None:
    program = """
        import json, sys
        from ebbtide.cli import run

        for command_line in sys.argv[1:]:
            status = run(command_line.split())
            print(json.dumps([status, sorted(sys.modules)]), file=sys.stderr)
    """
    done = run_process(
        [sys.executable, "-c", textwrap.dedent(program), *IMPORTS], cwd=folder
    )
    assert done.returncode == 0, done.stderr
    results = [
        json.loads(text) for text in done.stderr.splitlines() if text.startswith("[")
    ]
    for (command_line, unwanted), (status, imported) in zip(
        IMPORTS.items(), results, strict=True
    ):
        assert status == 0, command_line
        assert "ebbtide.cli" in imported
        assert not {name.split(".")[0] for name in imported} & unwanted, command_line
