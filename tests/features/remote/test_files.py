"""Traces at URLs: the same output as of a folder, few bytes, and failures in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.profiler.trace import open_trace
from tests.conftest import Run, ebbtide_in_process, slow_case
from tests.features.remote.conftest import TRACE, URL
from tests.features.remote.servers import Connection, check_keys, http_server

OLD_TRACES = TRACE.parents[1] / "tests" / "profiler" / "trace" / "old_traces"
COMMANDS = ["summary", *map(slow_case, ("findings", "windows", "summary --by rank"))]


def output(command: str, trace: object) -> str:
    """Return what a command prints, without where the trace is."""
    run = ebbtide_in_process(*command.split(), str(trace))
    assert run.returncode == 0, run.stderr
    return run.stdout.replace(str(trace), "RUN")


def failure(*words: str) -> str:
    """Return the one line of a command that fails."""
    run: Run = ebbtide_in_process(*words)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_commands__print_the_same_of_a_trace_on_s3(
    command: str, connection: Connection
) -> None:
    assert output(command, URL) == output(command, TRACE)


def test_commands__print_the_same_of_a_trace_on_a_web_server() -> None:
    with http_server(TRACE.parent) as url:
        trace = f"{url}/{TRACE.name}"
        assert output("summary", trace) == output("summary", TRACE)


def test_web_server__may_send_whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.features.remote.files._TAIL_BYTES", 512)
    with http_server(TRACE.parent, ranges=False) as url:
        trace = f"{url}/{TRACE.name}"
        assert output("summary", trace) == output("summary", TRACE)


@pytest.mark.parametrize(
    "command",
    [
        "diff {0} {0}",
        slow_case("sweep {0} --policy zero-offload"),
        slow_case("plan {0}"),
    ],
)
def test_commands__take_a_url_where_they_take_several_sources(
    command: str, connection: Connection
) -> None:
    printed = []
    for trace in (URL, str(TRACE)):
        run = ebbtide_in_process(*command.format(trace).split())
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout.replace(trace, "RUN"))
    assert printed[0] == printed[1]


def test_labels__reads_one_column(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.features.remote.files._TAIL_BYTES", 512)
    opened = open_trace(URL)
    before = connection.sent_bytes
    assert opened.labels(0, "memory", "pool") == open_trace(TRACE).labels(
        0, "memory", "pool"
    )
    sent = connection.sent_bytes - before
    size = (TRACE / "rank-0" / "memory.parquet").stat().st_size
    assert sent < 0.5 * size


def test_cut_connections__are_tried_again(connection: Connection) -> None:
    connection.cuts = 3
    assert output("summary", URL) == output("summary", TRACE)
    assert connection.cuts == 0


@pytest.mark.parametrize("command", ["summary", "export -o {}/made.json"])
def test_cut_connections__are_one_line(
    command: str, connection: Connection, tmp_path: Path
) -> None:
    connection.cuts = 1_000_000
    line = failure(*command.format(tmp_path).split(), URL)
    assert line.startswith(f"ebbtide: {URL}/meta.json cannot be read: ")
    assert not [*tmp_path.iterdir()]


def test_connection_cut_while_ranks_are_read__leaves_no_output(
    connection: Connection, tmp_path: Path
) -> None:
    opened = open_trace(URL)
    connection.cuts = 1_000_000
    line = failure("report", URL, "-o", str(tmp_path / "report.html"))
    assert "cannot be read" in line
    assert not [*tmp_path.iterdir()]
    connection.cuts = 0
    assert opened.phases(0).equals(open_trace(TRACE).phases(0))


def test_slow_answers__are_one_line(connection: Connection) -> None:
    connection.holds_up = True
    assert "meta.json cannot be read: " in failure("summary", URL)
    connection.holds_up = False
    assert output("summary", URL) == output("summary", TRACE)


def test_wrong_keys__are_one_line(connection: Connection, s3_port: int) -> None:
    check_keys(s3_port, checks=True)
    try:
        before = connection.requests
        assert "ACCESS_DENIED" in failure("summary", URL)
        assert connection.requests == before + 1
    finally:
        check_keys(s3_port, checks=False)


@pytest.mark.parametrize("url", [URL + "2", "s3://no-bucket/run.ebb"])
def test_missing_traces__are_one_line(url: str, connection: Connection) -> None:
    assert failure("summary", url) == (
        f"ebbtide: {url} is not a trace: it has no readable meta.json (No such file or "
        "directory)"
    )


def test_missing_extra__is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.features.remote import file_systems

    file_systems._fsspec.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    assert "pip install 'ebbtide[remote]'" in failure("summary", "https://host/run.ebb")
    file_systems._fsspec.cache_clear()


def test_import__says_that_its_files_must_be_here(tmp_path: Path) -> None:
    with http_server(TRACE.parent) as url:
        line = failure("import", f"{url}/trace.json", "-o", str(tmp_path / "run.ebb"))
    assert line.endswith("its files cannot be listed: copy them here first")


def test_watch__is_of_this_machine() -> None:
    line = failure("watch", URL, "--no-view", "--metrics", "0")
    assert f"{URL} is elsewhere: `ebbtide summary {URL}` reads what was copied" in line


def test_web_server__has_no_recordings() -> None:
    with http_server(OLD_TRACES) as url:
        line = failure("summary", f"{url}/0.3.0-cut-off.ebb")
    assert line.endswith("lists no files: recordings are at s3:// or gs://")
