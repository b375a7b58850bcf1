"""Commands that others have taken in, by their former names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ebbtide.cli import make_app
from ebbtide.cli.command import FORMER_NAMES
from ebbtide.profiler.trace import TraceBuilder
from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide_in_process, slow_case

TRACES = Path("traces").resolve()
H100 = str(TRACES / "h100-20b-blocking.ebb")
REPLAYED = "--machine h100-80gb --policy pipelined --policy zero-offload --jobs 1"
SIZES = "--scale-params 0.5,1 --free-bytes 0,20GB --subgroup-params 1e8 --host-free-bytes 200GB"
PROFILED = str(TRACES / "a100-torch-profiler.ebb")

# A command in the help: at the beginning of a line, or in an enumeration.
LISTED = r"(^  |  |, ){}(  |,|$)"


def answer(command_line: str, cwd: Path | None = None) -> dict[str, Any]:
    run = ebbtide_in_process(*command_line.split(), "--json", cwd=cwd)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_former_names__are_in_no_help() -> None:
    shown = ebbtide_in_process("--help").stdout
    assert all(re.search(LISTED.format(name), shown, re.MULTILINE) for name in ("summary", "compare", "import"))
    assert not any(re.search(LISTED.format(name), shown, re.MULTILINE) for name in FORMER_NAMES)
    for name in FORMER_NAMES:
        assert ebbtide_in_process(name, "--help").stdout == ebbtide_in_process(FORMER_NAMES[name][0], "--help").stdout


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("plan run.ebb -o p.png", "plan run.ebb --plot p.png"),
        ("plan run.ebb --output p.png", "plan run.ebb --plot p.png"),
        ("compare --iterations 5", "compare --steps 5"),
        ("dry-run --iterations 5 -- true", "dry-run --steps 5 -- true"),
    ],
)
def test_former_options__are_taken_and_in_no_help(former: str, now: str) -> None:
    name, option, *words = former.replace(" run.ebb", "").split()
    command = typer.main.get_command(make_app(name)).commands[name]  # type: ignore[attr-defined]
    (hidden,) = [parameter for parameter in command.params if option in parameter.opts]
    assert hidden.hidden
    (shown,) = [parameter for parameter in command.params if now.replace(" run.ebb", "").split()[1] in parameter.opts]
    assert not shown.hidden
    values = command.make_context(name, former.split()[1:]).params
    assert str(values[hidden.name]) == words[0]


@pytest.mark.parametrize(
    ("former", "now", "key"),
    [
        (f"link {H100} --rank 2", f"summary {H100} --by link --rank 2", "phases"),
        (f"steps {H100} --subgroups", f"summary {H100} --by substep -v", "steps"),
        (f"activity {PROFILED}", f"summary {PROFILED} --by activity", "kernels"),
        (f"iterations {H100} --by-rank --jobs 1", f"summary {H100} --by rank --jobs 1", "ranks"),
        slow_case(f"sweep {H100} {REPLAYED} {SIZES} -o FILE", f"replay {H100} {REPLAYED} {SIZES} -o FILE", "best"),
    ],
)
def test_former_names__print_what_the_commands_print_now(former: str, now: str, key: str, tmp_path: Path) -> None:
    former, now = (text.replace("FILE", "table.parquet --force") for text in (former, now))
    result = answer(former, tmp_path)
    assert result[key]
    assert result == answer(now, tmp_path)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Make a folder with the traces of two hosts whose clocks are not known."""
    for rank in (0, 1):
        builder = TraceBuilder("recorded")
        builder.rank(rank).phase("forward", rank * 10**10, rank * 10**10 + 10**6, 0).memory(rank * 10**10, 9)
        builder.write(tmp_path / f"{rank}.ebb")
    return tmp_path


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("merge 0.ebb 1.ebb --align start -o FILE", "import 0.ebb 1.ebb --align start -o FILE"),
        ("tables 0.ebb -o FILE --format parquet", "export 0.ebb --format parquet -o FILE"),
    ],
)
def test_former_names__write_what_the_commands_write_now(hosts: Path, former: str, now: str) -> None:
    for name, command_line in (("former", former), ("now", now)):
        run = ebbtide_in_process(*command_line.replace("FILE", name).split(), cwd=hosts)
        assert (run.returncode, run.stdout) == (0, ""), run.stderr
    former_files, files = ({p.name: p.read_bytes() for p in (hosts / name).rglob("*.*")} for name in ("former", "now"))
    assert len(files) > 1
    assert former_files == files


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("import 0.ebb 1.ebb -o x", "cannot be merged"),
        ("import 0.ebb file.log -o x", "is a trace already"),
        ("import 0.ebb 1.ebb -o x --capacity 80GB", "--capacity is for files of other tools"),
        ("import 0.ebb 0.ebb -o x", "both have rank 0"),
        ("export 0.ebb -o x.json --min-bytes 1GB", "--min-bytes is for tables"),
    ],
)
def test_import_and_export__refuse_what_does_not_go_together(hosts: Path, command_line: str, message: str) -> None:
    (hosts / "file.log").write_text("text")
    assert message in refused(ebbtide_in_process(*command_line.split(), cwd=hosts))
    assert not (hosts / "x").exists()


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("replay RUN RUN --recommend", "--recommend is for one job on one machine"),
        ("replay --params 13e9 --machine h200 --machine rtx4090", "--params is for one job on one machine"),
        ("replay RUN --machine h200 --jobs 2", "--jobs and --scheduler are for several"),
        ("replay RUN --host ddr5-2ch", "--host"),
        ("sweep RUN RUN --recommend -o x", "--recommend is for one job on one machine"),
    ],
)
def test_replay__refuses_options_of_one_job_for_several(command_line: str, message: str) -> None:
    assert message in refused(ebbtide_in_process(*command_line.replace("RUN", H100).split()))


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("summary RUN --by rank --rank 1", "--rank does not go with --by rank"),
        ("summary RUN --by activity --scheduler tcp://host:1", "--scheduler does not go with --by activity"),
        ("summary RUN --by link --subgroups", "--subgroups does not go with --by link"),
        ("summary RUN --by nothing", "nothing"),
        ("steps RUN --jobs 2", "--jobs"),
    ],
)
def test_summary__refuses_options_that_its_table_does_not_have(command_line: str, message: str) -> None:
    assert message in refused(ebbtide_in_process(*command_line.replace("RUN", H100).split()))
