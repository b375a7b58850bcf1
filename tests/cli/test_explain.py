"""The commands under "Explain", on complete traces and on traces that lack
something."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import run
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import (
    CAPACITY,
    MS,
    PEAK,
    Job,
    async_copies,
    devices,
    offloaded,
    on_cpu,
)
from tests.analysis.findings.test_find import troubled
from tests.analysis.metrics.deepspeed_jobs import deepspeed_job
from tests.conftest import ebbtide_in_process, needs_all_features, slow

BY = ("summary --by link", "summary --by iteration", "summary --by substep")
EXPLAINING = ("findings", "windows", "activity", *BY)
COMMANDS = ("memory", *EXPLAINING)
GPU = {
    "device": "cuda:0",
    "kind": "cuda",
    "capacity_bytes": CAPACITY,
    "link": {"peak_bytes_per_s": PEAK},
}


def monitored() -> TraceBuilder:
    """Make a trace with memory and counters, but without phases."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for t in range(10):
        rank.memory(t * MS, t << 30).link((t + 1) * MS, MS, "gpm", h2d_bytes_per_s=1e9)
    return builder


def unfinished() -> TraceBuilder:
    """Make a trace with a phase that belongs to no finished iteration."""
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).phase("forward", 0, MS).memory(0, 1 << 30).memory(
        MS, 2 << 30
    )
    return builder


def simulated() -> TraceBuilder:
    builder = TraceBuilder("simulated")
    rank = builder.rank(0, devices=[GPU])
    for n in range(3):
        rank.phase("update", n * MS, (n + 1) * MS, n)
        rank.add(
            "ops",
            start_ns=n * MS,
            end_ns=(n + 1) * MS,
            resource="cpu",
            name="update",
            iteration=n,
        )
    return builder


def extreme_figures() -> TraceBuilder:
    """Make a trace with impossible rates, missing sizes, and more memory than the
    device has."""
    job = Job(2, iterations=3)
    devices(job)
    job.memory("device", {"other": 90}).memory("reserved", {"other": 95}).memory(
        "allocated", {"other": 99}
    )
    job.copy("h2d", "forward", 0, 0, 5).copy(
        "d2h", "forward", 0, 4, None, None, ranks=[0]
    )
    for number in job.ranks:
        for rate in (math.inf, -1.0, 1e300):
            job.builder.rank(number).link(
                MS, MS, "gpm", f"cuda:{number}", h2d_bytes_per_s=rate
            )
    return job.builder


def bare_rank() -> TraceBuilder:
    builder = TraceBuilder()
    builder.rank(0)
    return builder


TRACES: dict[str, Callable[[], TraceBuilder]] = {
    "troubled": lambda: troubled().builder,
    "well": lambda: async_copies(offloaded(2)).builder,
    "on-cpu": lambda: on_cpu().builder,
    "no-phases": monitored,
    "no-memory": lambda: devices(Job(2)).builder,
    "no-link": lambda: offloaded(2, peak=None).builder,
    "unfinished": unfinished,
    "no-ranks": TraceBuilder,
    "bare-rank": bare_rank,
    "simulated": simulated,
    "extreme-figures": extreme_figures,
    "deepspeed": deepspeed_job,
}
WITHOUT_MEMORY = {"no-memory", "no-ranks", "bare-rank", "simulated"}
WITHOUT_ITERATIONS = {"no-phases", "unfinished", "no-ranks", "bare-rank"}
WITHOUT_LINK = {"no-link", "unfinished", "no-ranks", "bare-rank", "simulated", "on-cpu"}
WITH_STEPS = {"simulated", "deepspeed"}
# Traces of which another one is much the same.
SIMILAR = ("well", "no-link", "no-memory", "bare-rank", "extreme-figures")
# Command -> the traces that lack what it prints, and the list of its JSON object that
# is empty then.
LACKING = {
    "windows": (WITHOUT_MEMORY, "windows"),
    "memory": (WITHOUT_MEMORY, "pools"),
    "summary --by link": (WITHOUT_LINK, "copies"),
    "summary --by iteration": (WITHOUT_ITERATIONS, "rows"),
    "summary --by substep": (set(TRACES) - WITH_STEPS, "steps"),
    "findings": (set[str](), "findings"),
    "activity": (set(TRACES) - {"troubled"}, "kernels"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    for name, make in TRACES.items():
        make().write(folder / f"{name}.ebb")
    return {name: folder / f"{name}.ebb" for name in TRACES}


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


Printed = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "command", [pytest.param("memory", marks=needs_all_features), *EXPLAINING]
)
@pytest.mark.parametrize("name", slow(TRACES, but=TRACES.keys() - set(SIMILAR)))
def test_commands__explain_every_trace_or_say_in_one_line_what_it_lacks(
    name: str, command: str, written: dict[str, Path], capsys: Printed
) -> None:
    status = run([*command.split(), str(written[name]), "--json"])
    out, err = capsys.readouterr()
    text_status = run([*command.split(), str(written[name])])
    printed, errors = capsys.readouterr()
    assert (status, text_status, err, errors) == (0, 0, "", "")
    figures = json.loads(out, parse_constant=refuse)
    lacking, key = LACKING[command]
    if name in lacking:
        *_, last = printed.splitlines()
        assert last.startswith(f"{written[name]}: no ")
        assert any(word in last for word in ("recorded", "training iteration"))
        assert figures[key] == []
    assert printed.strip()
    # Python values must not show.
    assert not any(word in printed for word in ("nan", "inf ", "None", "Traceback"))


def answer(capsys: Printed, command: str, *arguments: object) -> Any:
    assert run([*command.split(), *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def text(capsys: Printed, command: str, *arguments: object) -> str:
    assert run([*command.split(), *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_findings__are_in_order_with_their_gains(
    written: dict[str, Path], capsys: Printed
) -> None:
    result = answer(capsys, "findings", written["troubled"])
    assert set(result) == {"findings", "unknown", "not_applicable", "nothing_found"}
    keys = {
        "rule",
        "title",
        "potential_gain_ms",
        "worth_ms",
        "evidence",
        "advice",
        "removes",
        "action",
    }
    assert set(result["findings"][0]) == keys
    output = text(capsys, "findings", written["troubled"], "-v")
    positions = [
        output.index(f"{n}. {f['title']}") for n, f in enumerate(result["findings"], 1)
    ]
    assert positions == sorted(positions)
    largest = max(finding["potential_gain_ms"] or 0.0 for finding in result["findings"])
    assert f"(up to {largest:,.1f} ms)" in output
    assert (
        f"{written['troubled']}: 2,240 ms an iteration, {len(result['findings'])} "
        "findings (gains overlap)" in output
    )
    assert "cannot answer" not in output
    well = text(capsys, "findings", written["well"])
    assert "0 findings" in well
    assert "cannot answer" not in well
    assert "This trace cannot answer:" in text(
        capsys, "findings", written["no-memory"], "-v"
    )


@needs_all_features
def test_commands__show_whole_traces_without_iterations(
    written: dict[str, Path], capsys: Printed
) -> None:
    path = written["no-phases"]
    memory = answer(capsys, "memory", path)
    assert memory["pools"] == [
        {
            "rank": 0,
            "phase": None,
            "pool": "device",
            "low_bytes": 0,
            "peak_bytes": 9 << 30,
        }
    ]
    (free,) = memory["gaps"]
    assert (free["gap"], free["phase"], free["low_bytes"]) == (
        "free",
        None,
        CAPACITY - (9 << 30),
    )
    assert "figures of the whole trace: no phases were recorded" in text(
        capsys, "memory", path
    )
    down, up = answer(capsys, "summary --by link", path)["phases"]
    assert (down["phase"], down["direction"], down["mean_bytes_per_s"]) == (
        None,
        "h2d",
        pytest.approx(1e9),
    )
    assert down["bytes"] == pytest.approx(1e7)
    assert up["bytes"] is None
    printed = text(capsys, "summary --by link", path)
    assert "figures are of the whole trace: no phases were recorded" in printed
    assert re.search(r"h2d +9\.54 ", printed)


def test_commands__show_copies_without_iterations(
    written: dict[str, Path], capsys: Printed, tmp_path: Path
) -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).transfer("h2d", 0, MS, 10**6).transfer(
        "d2h", 3 * MS, 4 * MS, 5 * 10**5
    )
    path = tmp_path / "copies.ebb"
    builder.write(path)
    down, up = answer(capsys, "summary --by link", path)["phases"]
    assert (down["bytes"], down["busy_ms"], down["mean_bytes_per_s"]) == (
        1e6,
        1.0,
        pytest.approx(1e6 / 4e-3),
    )
    assert (up["bytes"], up["busy_ms"]) == (5e5, 1.0)
    printed = text(capsys, "summary", path, "-v")
    assert "figures are of the whole trace" in printed
    assert "Medians" not in printed
    assert "Copies, whole trace" in printed
    assert answer(capsys, "summary", path)["iterations"] == 0


def test_summary__of_one_rank_has_its_times(
    written: dict[str, Path], capsys: Printed
) -> None:
    whole, one = (
        answer(capsys, "summary", written["troubled"], *rank)
        for rank in ((), ("--rank", 1))
    )
    assert (whole["ranks"], one["ranks"]) == (2, 1)
    assert one["iteration_ms"] <= whole["iteration_ms"]
    assert "times of the slowest rank" in text(capsys, "summary", written["troubled"])
    assert "times of the slowest rank" not in text(
        capsys, "summary", written["troubled"], "--rank", 1
    )
    assert run(["summary", str(written["troubled"]), "--rank", "9"]) == 2


def test_rank_option__selects_a_rank(written: dict[str, Path], capsys: Printed) -> None:
    path = written["troubled"]
    assert {
        p["rank"]
        for p in answer(capsys, "summary --by link", path, "--rank", 1)["phases"]
    } == {1}
    assert {
        s["rank"]
        for s in answer(capsys, "summary --by iteration", path, "--rank", "1e0")[
            "spreads"
        ]
    } == {1}
    assert {
        w["rank"] for w in answer(capsys, "windows", path, "--rank", 1)["windows"]
    } == {1}
    assert "of 2 ranks" not in text(capsys, "summary --by link", path, "--rank", 1)
    for command in (*BY[:2], "windows"):
        for wrong in ("7", "-1", "one", "0.5"):
            assert run([*command.split(), str(path), "--rank", wrong]) == 2
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)


@needs_all_features
def test_memory__selects_a_rank(written: dict[str, Path], capsys: Printed) -> None:
    path = written["troubled"]
    assert {
        p["rank"] for p in answer(capsys, "memory", path, "--rank", 1)["pools"]
    } == {1}
    for wrong in ("7", "-1", "one", "0.5"):
        assert run(["memory", str(path), "--rank", wrong]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)


def test_windows__selects_by_length_and_iteration(
    written: dict[str, Path], capsys: Printed
) -> None:
    path = written["well"]

    def windows_with(*options: object) -> Any:
        return answer(capsys, "windows", path, "--min-bytes", "0.5GiB", *options)

    every_window = windows_with()["windows"]
    assert len(every_window) == 2 * 8 * 4
    assert len({(w["rank"], w["iteration"], w["phase"]) for w in every_window}) == len(
        every_window
    )
    assert {w["phase"] for w in windows_with("--min-ms", 100)["windows"]} == set(PHASES)
    assert {w["phase"] for w in windows_with("--min-ms", 100.1)["guaranteed"]} == {
        "backward"
    }
    for iterations, numbers in (
        ("3", {3}),
        ("3:6", {3, 4, 5}),
        ("6:", {6, 7}),
        (":2", {0, 1}),
        ("9:", set()),
    ):
        assert {
            w["iteration"] for w in windows_with("--iterations", iterations)["windows"]
        } == numbers
    assert windows_with("--iterations", "3", "--min-ms", 150)["windows"] == [
        w for w in every_window if w["iteration"] == 3 and w["phase"] == "backward"
    ]
    for wrong in (
        ("--min-ms", "-1"),
        ("--min-ms", "long"),
        ("--iterations", "5:3"),
        ("--iterations", "x"),
    ):
        assert run(["windows", str(path), *wrong]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)


def test_commands__refuse_other_folders_in_one_line(
    tmp_path: Path, capsys: Printed
) -> None:
    for command in COMMANDS:
        (tmp_path / "meta.json").write_text("{}")
        for path in (tmp_path, tmp_path / "missing.ebb"):
            assert run([*command.split(), str(path), "--json"]) == 2
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)


def test_windows__tells_a_link_without_a_peak_from_one_that_was_not_recorded(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder()
    device = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 2**34}
    rank = builder.rank(0, devices=[device]).memory(0, 2**30).memory(10**9, 2**30)
    builder.write(tmp_path / "bare.ebb")
    rank.link(10**9, 10**9, "nvml-throughput", h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    builder.write(tmp_path / "link.ebb")
    bare, link = (
        ebbtide_in_process("windows", f"{name}.ebb", cwd=tmp_path).stdout
        for name in ("bare", "link")
    )
    assert "link use was not recorded" in bare
    assert "link use was not recorded" not in link
    assert "ebbtide import --link 5x16" in link


def test_activity__answers_with_the_critical_path() -> None:
    trace = Path(__file__).parents[2] / "traces" / "a100-torch-profiler.ebb"
    text = ebbtide_in_process("activity", trace, "--critical-path").stdout
    assert text.startswith("Critical path of iteration 1012: ")
    assert text.splitlines()[-1].startswith("next: ebbtide export")
    path = json.loads(
        ebbtide_in_process("activity", trace, "--critical-path", "--json").stdout
    )["critical_path"]
    assert path["length_ms"] == pytest.approx(76.748)
    assert sum(part["ms"] for part in path["parts"]) == pytest.approx(path["length_ms"])
    assert {part["kind"] for part in path["parts"]} == {
        "kernel",
        "launch",
        "wait",
        "copy",
        "collective",
        "host",
    }
    refused = ebbtide_in_process("summary", trace, "--critical-path")
    assert (
        refused.returncode,
        "--critical-path does not go with --by phase" in refused.stderr,
    ) == (2, True)
