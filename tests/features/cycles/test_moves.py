"""Moves of state: their bytes and rates, what bounds them, and what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.iteration_mean import uneven_iterations
from ebbtide.features.cycles.changes import advise
from ebbtide.features.cycles.cycles import Cycles, find_cycles
from ebbtide.features.cycles.tables import lead, move_text
from ebbtide.profiler.trace import Trace
from tests.conftest import ebbtide_in_process
from tests.features.cycles.jobs import GIB, Job

STATE = 10 * GIB


def colocated(
    capacity: int = 80 * GIB, memory: str = "pageable", out_ms: float = 2000
) -> Job:
    """Run a job that moves its state out before each rollout, which takes 30 GiB."""
    job = Job(capacity)
    job.allocate(20 * GIB)
    for _ in range(5):
        start = job.at
        job.copy("d2h", STATE, out_ms, memory)
        job.mark("sleep", start)
        start = job.at
        job.allocate(30 * GIB)
        job.forwards(100)
        job.mark("rollout", start)
        job.allocate(-30 * GIB)
        start = job.at
        job.copy("h2d", STATE, 500, memory)
        job.mark("wake", start)
        start = job.at
        job.allocate(5 * GIB)
        job.train(4)
        job.allocate(-5 * GIB)
        job.mark("update", start)
    return job


def cycles_of(trace: Trace) -> Cycles:
    cycles = find_cycles(trace, 0)
    assert cycles is not None
    return cycles


def test_moves__have_bytes_rates_and_what_bounds_them() -> None:
    cycles = cycles_of(colocated().trace())
    out, back = cycles.moves
    assert (out.part, out.direction, out.bytes) == ("sleep", "out", STATE)
    assert (back.part, back.direction, back.bytes) == ("wake", "in", STATE)
    assert out.rate == pytest.approx(STATE / 2.0, rel=1e-3)
    assert (out.is_link_bound, out.cause) == (False, "pageable memory")
    # 21.5 of 25 GB/s.
    assert (back.is_link_bound, back.cause) == (True, None)
    assert "bounded by pageable memory, not by the link (25 GB/s)" in move_text(out)
    assert "bounded by the link" in move_text(back)
    rollout = next(part for part in cycles.parts if part.name == "rollout")
    assert rollout.peak_bytes == 40 * GIB
    assert rollout.min_free_bytes == 40 * GIB


def test_advice__keeps_state_where_it_fits_beside_the_rollout() -> None:
    # 40 GiB of rollout and 10 of state: 50 fit, 49 do not.
    for capacity, kind in ((50 * GIB, "keep"), (49 * GIB, "pin")):
        change = advise(cycles_of(colocated(capacity).trace())).changes[0]
        assert change.kind == kind
    kept = advise(cycles_of(colocated().trace())).changes[0]
    assert kept.saved_ms == pytest.approx(2500, rel=1e-3)


def test_advice__copies_beside_parts_that_have_room() -> None:
    job = Job(60 * GIB)
    job.allocate(45 * GIB)
    for _ in range(4):
        for name, ms in (("score", 300), ("rollout", 0)):
            start = job.at
            if name == "rollout":
                job.copy("d2h", 20 * GIB, 900, "pinned")
                job.mark("offload", start)
                start = job.at
                job.allocate(34 * GIB)
                job.forwards(50)
                job.allocate(-34 * GIB)
                job.mark("rollout", start)
                start = job.at
                job.wait(200)
                job.mark("reward", start)
                start = job.at
                job.copy("h2d", 20 * GIB, 900, "pinned")
                job.mark("onload", start)
                start = job.at
                job.train(4)
                job.mark("update", start)
            else:
                job.wait(ms)
                job.mark(name, start)
    changes = advise(cycles_of(job.trace())).changes
    (under,) = (change for change in changes if change.kind == "overlap")
    assert "onload on another stream, under reward" in under.text
    assert under.saved_ms == pytest.approx(200, rel=1e-3)


def test_windows__are_the_parts_with_more_free_memory() -> None:
    windows = advise(cycles_of(colocated().trace())).windows
    assert [(window.parts, window.free_bytes) for window in windows] == [
        (("sleep",), 60 * GIB),
        (("wake", "update"), 55 * GIB),
    ]


def text(view: Iterator[object]) -> str:
    return "\n".join(str(line) for line in view if isinstance(line, str))


def test_headlines__name_the_cycle() -> None:
    trace = colocated().trace()
    assert "4 iterations, 75 % of it sleep" in text(lead(trace))
    times = uneven_iterations(trace)
    assert times is not None
    assert times.reason.startswith("a cycle of 2,6")
    rules = [finding.rule for finding in find(trace).findings]
    assert "moved-state" in rules
    # What the job repeats is no stall.
    assert "between-phases" not in rules


def test_repeats__is_no_reason_where_each_iteration_has_a_rollout() -> None:
    job = Job()
    for number in range(12):
        start = job.at
        job.wait(300 if number == 7 else 20)
        job.mark("rollout", start)
        job.train()
    trace = job.trace()
    assert find_cycles(trace, 0) is not None
    times = uneven_iterations(trace)
    assert times is not None
    assert times.reason.startswith("1 of 10 iterations")


def test_cycles__prints_draws_and_fits_its_schema(tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    path = tmp_path / "run.ebb"
    colocated().builder.write(path)
    picture = tmp_path / "cycle.png"
    shown = ebbtide_in_process("cycles", path, "-o", picture)
    assert "sleep: 10.00 GiB out at 5.37 GB/s" in shown.stdout
    assert "DO  keep the state" in shown.stdout
    assert picture.stat().st_size > 10_000
    printed = json.loads(ebbtide_in_process("cycles", path, "--json").stdout)
    (cycle,) = printed["cycles"]
    assert cycle["parts"][0]["name"] == "sleep"
    schema = json.loads(Path("docs/schemas/cycles.json").read_text())
    Draft202012Validator(schema).validate(printed)
    summary = ebbtide_in_process("summary", path).stdout
    assert summary.index("a cycle of 4 iterations") < summary.index("an iteration")
    figures = json.loads(ebbtide_in_process("summary", path, "--json").stdout)
    parts = [(part["name"], part["peak_bytes"]) for part in cycle["parts"]]
    leading = figures["cycle"]["parts"]
    assert [(part["name"], part["peak_bytes"]) for part in leading] == parts
    assert figures["cycle"]["median_ms"] == cycle["median_ms"]
    assert figures["mean_ms"] > 1.2 * figures["iteration_ms"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "cycle.gif"), "pictures are .png, .svg or .pdf"),
        (("--rank", "7"), "rank 7"),
    ],
)
def test_cycles__refuses_what_it_cannot_do(
    options: tuple[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.ebb"
    colocated().builder.write(path)
    done = ebbtide_in_process("cycles", path, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_cycles__of_a_job_without_any_says_how_to_mark_them(tmp_path: Path) -> None:
    job = Job()
    job.allocate(GIB)
    job.train(9)
    path = tmp_path / "run.ebb"
    job.builder.write(path)
    shown = ebbtide_in_process("cycles", path)
    assert "nothing repeats around its iterations" in shown.stdout
    assert "ebbtide.step" in shown.stdout
    drawn = ebbtide_in_process("cycles", path, "-o", tmp_path / "c.png")
    assert drawn.returncode == 2
