"""The explaining commands, on traces from disk that have everything, and on traces that lack something."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import run
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import CAPACITY, MS, PEAK, Job, async_copies, devices, offloaded, on_cpu
from tests.analysis.findings.test_find import troubled
from tests.analysis.metrics.deepspeed_jobs import deepspeed_job
from tests.conftest import ebbtide

COMMANDS = ("findings", "link", "memory", "iterations", "windows", "steps")
GPU = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": CAPACITY, "link": {"peak_bytes_per_s": PEAK}}


def monitored() -> TraceBuilder:
    """Memory and counters, no phases."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for t in range(10):
        rank.memory(t * MS, t << 30).link((t + 1) * MS, MS, "gpm", h2d_bytes_per_s=1e9)
    return builder


def unfinished() -> TraceBuilder:
    """A phase that belongs to no finished iteration."""
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).phase("forward", 0, MS).memory(0, 1 << 30).memory(MS, 2 << 30)
    return builder


def simulated() -> TraceBuilder:
    builder = TraceBuilder("simulated")
    rank = builder.rank(0, devices=[GPU])
    for n in range(3):
        rank.phase("update", n * MS, (n + 1) * MS, n)
        rank.add("ops", start_ns=n * MS, end_ns=(n + 1) * MS, resource="cpu", name="update", iteration=n)
    return builder


def odd_figures() -> TraceBuilder:
    """Rates that no link has, sizes that are missing, more memory than there is."""
    job = Job(2, iterations=3)
    devices(job)
    job.memory("device", {"other": 90}).memory("reserved", {"other": 95}).memory("allocated", {"other": 99})
    job.copy("h2d", "forward", 0, 0, 5).copy("d2h", "forward", 0, 4, None, None, ranks=[0])
    for number in job.ranks:
        for rate in (math.inf, -1.0, 1e300):
            job.builder.rank(number).link(MS, MS, "gpm", f"cuda:{number}", h2d_bytes_per_s=rate)
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
    "odd-figures": odd_figures,
    "deepspeed": deepspeed_job,
}
# Nothing can be called free there.
WITHOUT_MEMORY = {"no-memory", "no-ranks", "bare-rank", "simulated"}
WITH_STEPS = {"simulated", "deepspeed"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    for name, make in TRACES.items():
        make().write(folder / f"{name}.ebb")
    return {name: folder / f"{name}.ebb" for name in TRACES}


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


Printed = pytest.CaptureFixture[str]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", TRACES)
def test_every_trace_is_explained_or_refused_in_one_line(
    name: str, command: str, written: dict[str, Path], capsys: Printed
) -> None:
    refused = name in WITHOUT_MEMORY if command == "windows" else command == "steps" and name not in WITH_STEPS
    status = run([command, str(written[name]), "--json"])
    out, err = capsys.readouterr()
    text = run([command, str(written[name])])
    told, errors = capsys.readouterr()
    if refused:
        assert (status, text, out) == (2, 2, "")
        assert err == errors
        assert len(err.splitlines()) == 1
        assert ("memory" if command == "windows" else "has no sub-steps of an update: record") in err
        return
    assert (status, text, err, errors) == (0, 0, "", "")
    assert isinstance(json.loads(out, parse_constant=refuse), dict)
    assert told.strip()
    # Nothing of how it is made shows.
    assert not any(word in told for word in ("nan", "inf ", "None", "Traceback"))


def answer(capsys: Printed, *arguments: object) -> Any:
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def text(capsys: Printed, *arguments: object) -> str:
    assert run([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_findings_stand_in_order_with_their_worth(written: dict[str, Path], capsys: Printed) -> None:
    found = answer(capsys, "findings", written["troubled"])
    assert set(found) == {"findings", "unknown"}
    assert set(found["findings"][0]) == {"rule", "title", "worth_ms", "evidence", "advice"}
    told = text(capsys, "findings", written["troubled"])
    places = [told.index(f"{n}. {f['title']}") for n, f in enumerate(found["findings"], 1)]
    assert places == sorted(places)
    assert "(potential gain: up to 400.0 ms of 2,240 ms per iteration)" in told
    assert "Estimated gains overlap; do not add them." in told
    assert "cannot tell" not in told
    well = text(capsys, "findings", written["well"])
    assert "0 findings" in well
    assert "cannot tell" not in well
    assert "This trace cannot tell:" in text(capsys, "findings", written["no-memory"])


def test_link_has_a_row_per_phase_and_direction(written: dict[str, Path], capsys: Printed) -> None:
    found = answer(capsys, "link", written["troubled"])
    assert [entry["source"] for entry in found["ranks"]] == ["copies", "copies"]
    assert len(found["phases"]) == 2 * 4 * 2
    (use,) = [p for p in found["phases"] if (p["rank"], p["phase"], p["direction"]) == (0, "backward", "d2h")]
    assert use["busy_ms"] == pytest.approx(400)
    assert use["share_of_peak"] == pytest.approx(2e9 / 0.9 / PEAK)
    told = text(capsys, "link", written["troubled"])
    assert "rank 0 of 2 ranks" in told
    assert "pageable" in told
    assert "400.0 ms" in told


def test_steps_have_a_row_each_and_with_subgroups_one_of_each(written: dict[str, Path], capsys: Printed) -> None:
    found = answer(capsys, "steps", written["deepspeed"])
    assert set(found) == {"pool", "tiles", "steps", "subgroups", "resources"}
    assert len(found["steps"]) == 11
    assert len(found["subgroups"]) == 5 * 5
    assert set(found["steps"][0]["h2d"]) == {
        "bytes",
        "busy_share",
        "pinned_share",
        "pageable_share",
        "busy_bytes_per_s",
        "share_of_peak",
    }
    told = text(capsys, "steps", written["deepspeed"])
    assert "they follow each other" in told
    assert "update: cpu 240.0 ms (67 %)" in told
    (row,) = [line.split() for line in told.splitlines() if " parameters " in line]
    assert row[:5] == ["parameters", "update", "host", "100.0", "ms"]
    assert row[-3:] == ["h2d", "20.00", "GiB"]
    assert "By subgroup" not in told
    assert "By subgroup" in text(capsys, "steps", written["deepspeed"], "--subgroups")
    assert "times do not add up" in text(capsys, "steps", written["simulated"])


def test_memory_has_a_row_per_pool_and_gap(written: dict[str, Path], capsys: Printed) -> None:
    found = answer(capsys, "memory", written["troubled"])
    assert {g["gap"] for g in found["gaps"]} == {"fragmentation", "outside torch", "free"}
    assert {g["low_bytes"] for g in found["gaps"] if g["gap"] == "outside torch"} == {10 << 30}
    assert "20.00 GiB" in text(capsys, "memory", written["troubled"])
    # What is used beyond the capacity leaves nothing free, and no gap is negative.
    gaps = answer(capsys, "memory", written["odd-figures"])["gaps"]
    assert {(g["low_bytes"], g["peak_bytes"]) for g in gaps} == {(0, 0)}


def test_iterations_name_the_slowest_rank(written: dict[str, Path], capsys: Printed) -> None:
    found = answer(capsys, "iterations", written["troubled"])
    assert (found["counted"], found["warmup"], found["slowest_rank"]) == (6, [0, 1], {"0": 0, "1": 6})
    assert len(found["rows"]) == 2 * 8
    told = text(capsys, "iterations", written["troubled"])
    assert "most often slowest: rank 1, in 6 of 6 iterations" in told
    assert "0 iterations counted" in text(capsys, "iterations", written["unfinished"])


def test_a_rank_can_be_asked_for(written: dict[str, Path], capsys: Printed) -> None:
    path = written["troubled"]
    assert {p["rank"] for p in answer(capsys, "link", path, "--rank", 1)["phases"]} == {1}
    assert {p["rank"] for p in answer(capsys, "memory", path, "--rank", 1)["pools"]} == {1}
    assert {s["rank"] for s in answer(capsys, "iterations", path, "--rank", "1e0")["spreads"]} == {1}
    assert {w["rank"] for w in answer(capsys, "windows", path, "--rank", 1)["windows"]} == {1}
    assert "of 2 ranks" not in text(capsys, "link", path, "--rank", 1)
    for command in ("link", "memory", "iterations", "windows"):
        for wrong in ("7", "-1", "one", "0.5"):
            assert run([command, str(path), "--rank", wrong]) == 2
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)


def test_windows_can_be_asked_for_by_length_and_iteration(written: dict[str, Path], capsys: Printed) -> None:
    path = written["well"]

    def found(*options: object) -> Any:
        return answer(capsys, "windows", path, "--min-bytes", "0.5GiB", *options)

    every = found()["windows"]
    assert len(every) == 2 * 8 * 4
    assert len({(w["rank"], w["iteration"], w["phase"]) for w in every}) == len(every)
    assert {w["phase"] for w in found("--min-ms", 100)["windows"]} == {"forward", "backward", "update"}
    assert {w["phase"] for w in found("--min-ms", 100.1)["guaranteed"]} == {"backward"}
    for asked, numbers in (("3", {3}), ("3:6", {3, 4, 5}), ("6:", {6, 7}), (":2", {0, 1}), ("9:", set())):
        assert {w["iteration"] for w in found("--iterations", asked)["windows"]} == numbers
    assert found("--iterations", "3", "--min-ms", 150)["windows"] == [
        w for w in every if w["iteration"] == 3 and w["phase"] == "backward"
    ]
    for wrong in (("--min-ms", "-1"), ("--min-ms", "long"), ("--iterations", "5:3"), ("--iterations", "x")):
        assert run(["windows", str(path), *wrong]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_trace_is_refused_in_one_line(command: str, tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "meta.json").write_text("{}")
    for path in (tmp_path, tmp_path / "missing.ebb"):
        assert run([command, str(path), "--json"]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)


def test_they_run_as_commands_too(written: dict[str, Path]) -> None:
    shown = ebbtide("findings", written["troubled"], "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(json.loads(shown.stdout)["findings"]) == 12
