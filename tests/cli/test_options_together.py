"""Options that do not go together, aliases of commands, and commands that write what
others write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.cli.command import ALIASES
from ebbtide.profiler.trace import TraceBuilder
from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide_in_process

TRACES = Path("traces").resolve()
H100 = str(TRACES / "h100-20b-blocking.ebb")
PROFILED = str(TRACES / "a100-torch-profiler.ebb")


def test_aliases__print_what_the_commands_print() -> None:
    for alias, words in ALIASES.items():
        run, expected = (
            ebbtide_in_process(*first, PROFILED, "--json") for first in ([alias], words)
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout == expected.stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Make a folder with the traces of two hosts whose clocks are not known."""
    for rank in (0, 1):
        builder = TraceBuilder("recorded")
        builder.rank(rank).phase(
            "forward", rank * 10**10, rank * 10**10 + 10**6, 0
        ).memory(rank * 10**10, 9)
        builder.write(tmp_path / f"{rank}.ebb")
    return tmp_path


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("import 0.ebb 1.ebb -o x", "cannot be merged"),
        ("import 0.ebb file.log -o x", "is a trace already"),
        (
            "import 0.ebb 1.ebb -o x --capacity 80GB",
            "--capacity is for files of other tools",
        ),
        ("import 0.ebb 0.ebb -o x", "both have rank 0"),
        ("export 0.ebb -o x.json --min-bytes 1GB", "--min-bytes is for tables"),
    ],
)
def test_import_and_export__refuse_what_does_not_go_together(
    hosts: Path, command_line: str, message: str
) -> None:
    (hosts / "file.log").write_text("text")
    assert message in refused(ebbtide_in_process(*command_line.split(), cwd=hosts))
    assert not (hosts / "x").exists()


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("replay RUN --host ddr5-2ch", "--host"),
        ("sweep RUN RUN --recommend -o x", "--recommend"),
        ("replay RUN --jobs 2", "--jobs"),
        (
            "replay --workload a.json --workload b.json",
            "--workload is given more than once: `ebbtide sweep`",
        ),
        (
            "replay RUN --free-bytes 1GB --free-bytes 2GB",
            "--free-bytes is given more than once",
        ),
        (
            "replay RUN --machine h200 --machine rtx4090",
            "--machine is given more than once: `ebbtide sweep`",
        ),
    ],
)
def test_replay_and_sweep__refuse_options_of_each_other(
    command_line: str, message: str
) -> None:
    assert message in refused(
        ebbtide_in_process(*command_line.replace("RUN", H100).split())
    )


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("summary RUN --by rank --rank 1", "--rank does not go with --by rank"),
        (
            "summary RUN --by activity --scheduler tcp://host:1",
            "--scheduler does not go with --by activity",
        ),
        ("summary RUN --by nothing", "nothing"),
        ("summary RUN --by substep --jobs 2", "--jobs"),
    ],
)
def test_summary__refuses_options_that_its_table_does_not_have(
    command_line: str, message: str
) -> None:
    assert message in refused(
        ebbtide_in_process(*command_line.replace("RUN", H100).split())
    )
