"""The rows of a sweep: those of single replays, in order, whatever runs them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep import (
    SCHEMA,
    Journal,
    Row,
    Scenario,
    Task,
    best_of,
    find_pairs,
    on_this_machine,
    rows_of,
    write_rows,
)
from ebbtide.interleave.experiments.sweep.task import key_of, run
from ebbtide.interleave.replay.results import replay
from tests.interleave.experiments.sweep.sweeps import machine, rows, tasks, workload, write_files

FAST = ["zero-offload", "twin-flow:0.5", "interleaved:2"]


def quiet(finished: int, total: int) -> None:
    """Progress that nobody looks at."""


def test_a_row_has_the_figures_of_the_replay() -> None:
    job, box = Scenario(free_bytes=9e9).of(workload()), machine()
    (row,) = rows(["interleaved:2"], [Scenario(free_bytes=9e9)])
    expected = replay(job, box, ["interleaved:2"]).as_json()
    (result,) = expected["results"]
    busy = result.pop("busy")
    assert {name: row[name] for name in result} == result
    assert {name: row[f"{name}_busy_share"] for name in busy} == busy
    assert {name: row[f"bound_{name}"] for name in expected["bound"]} == expected["bound"]
    assert (row["workload"], row["machine"], row["error"]) == ("job", "box", None)
    assert (row["params"], row["subgroups"], row["least_free_bytes"]) == (2_000_000_000, 20, 9e9)
    # The table leaves none of them out.
    assert set(row) == set(SCHEMA.names)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (tasks(["adaptive"], workloads=[workload(gpu_free_bytes=None)]), "what device memory is free"),
        (tasks(["twin-flow"]), "lacks the share"),
        (tasks(["gpu-only"], machines=[machine(gpu_update_params_per_s=None)]), "gpu_update_params_per_s"),
        (tasks(["zero-offload"], [Scenario(scale_params=3)]), "do not fit"),
        (tasks(["zero-offload"], workloads=[replace(workload(), params="many")]), "TypeError"),  # type: ignore[arg-type]
    ],
    ids=["policy", "value", "machine", "scenario", "fault"],
)
def test_a_combination_that_cannot_be_says_why_and_has_no_figures(task: list[Task], says: str) -> None:
    row = run(*task)
    assert says in row["error"]
    assert set(row) == {"workload", "machine", "policy", "scale_params", "free_bytes", "subgroup_params", "error"}


def test_another_version_computes_nothing() -> None:
    (task,) = tasks(["pipelined"])
    with pytest.raises(UserError, match=r"install 0\.0\.1 there"):
        run(task | {"ebbtide": "0.0.1"})


def test_any_number_of_processes_gives_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    scenarios = [Scenario(scale_params=scale, free_bytes=free) for scale in (2.0, 0.5) for free in (4e9, None)]
    asked = tasks([*FAST, "twin-flow"], scenarios)
    expected = [run(task) for task in asked]
    seen: list[tuple[int, int]] = []
    for jobs in (1, 3):
        with Journal(tmp_path / f"rows{jobs}") as journal:
            found = rows_of(asked, journal, partial(on_this_machine, jobs=jobs), lambda *state: seen.append(state))
        assert found == expected
        assert seen == [(finished, len(asked)) for finished in range(len(asked) + 1)]
        seen.clear()


def test_what_the_journal_has_is_not_computed_again(tmp_path: Path) -> None:
    asked = tasks(FAST)
    with Journal(tmp_path / "rows") as journal:
        journal.add(key_of(asked[1]), {"from": "before"})
        journal.add("another question", {"from": "elsewhere"})
        found = rows_of(asked, journal, partial(on_this_machine, jobs=1), quiet)
    assert found == [run(asked[0]), {"from": "before"}, run(asked[2])]


def test_every_part_of_the_question_makes_it_another() -> None:
    job = workload()
    asked = [
        *tasks(["pipelined", "gpu-only"]),
        *tasks(["pipelined"], [Scenario(scale_params=2), Scenario(free_bytes=1.0), Scenario(subgroup_params=5)]),
        *tasks(["pipelined"], workloads=[replace(job, clipping=False), replace(job, name="other")]),
        *tasks(["pipelined"], machines=[machine(step_overhead_s=0.1)]),
    ]
    asked.append(asked[0] | {"ebbtide": "another version"})
    assert len({key_of(task) for task in asked}) == len(asked)
    assert key_of(asked[0]) == key_of(tasks(["pipelined"])[0])


def test_the_table_on_disk(tmp_path: Path) -> None:
    asked = tasks([*FAST, "twin-flow"], machines=[machine(), machine(name="other", host_memory_bytes=None)])
    found = [run(task) for task in asked]
    write_rows(found, asked, tmp_path / "table")
    table = pq.read_table(tmp_path / "table")
    assert [{name: row.get(name) for name in SCHEMA.names} for row in found] == table.to_pylist()
    about = json.loads(table.schema.metadata[b"ebbtide"])
    assert [box["name"] for box in about["machines"]] == ["box", "other"]
    assert about["workloads"][0]["params"] == 2_000_000_000


def made(policy: str, iteration: float, fits: bool | None = True, **more: object) -> Row:
    row = {"workload": "job", "machine": "box", "scale_params": 1.0, "free_bytes": None, "subgroup_params": None}
    return {
        **row,
        "policy": policy,
        "iteration_ms": iteration,
        "bound_iteration_ms": 80.0,
        "fits": fits,
        "error": None,
    } | more


def test_the_best_is_the_quickest_that_fits() -> None:
    found = [made("zero-offload", 200.0), made("a", 100.0), made("b", 90.0, None), made("c", 50.0, False)]
    (best,) = best_of(found)
    assert best.row is found[1]
    assert best.speed_up == 2
    assert best.above_bound == pytest.approx(0.25)


def test_what_may_fit_is_better_than_nothing_and_what_does_not_is_nothing() -> None:
    found = [made("b", 90.0, None), made("c", 50.0, False), made("d", 10.0) | {"error": "no"}]
    (best,) = best_of(found)
    assert best.row is found[0]
    assert best.speed_up is None
    (none,) = best_of(found[1:])
    assert (none.row, none.speed_up, none.above_bound) == (None, None, None)
    assert none.as_json()["policy"] is None


def test_each_scenario_has_its_best_over_policies_and_subgroups() -> None:
    found = [
        made(policy, iteration - size, subgroup_params=size, free_bytes=free)
        for free in (1.0, None)
        for size in (10, 20)
        for policy, iteration in (("zero-offload", 220.0), ("a", 120.0))
    ]
    bests = best_of(found)
    assert [best.free_bytes for best in bests] == [1.0, None]
    assert [best.row and best.row["subgroup_params"] for best in bests] == [20, 20]
    # Over the baseline with the same subgroups.
    assert [best.speed_up for best in bests] == [2.0, 2.0]


def test_what_shares_a_name_is_called_by_its_path(tmp_path: Path) -> None:
    write_files(tmp_path)
    for name, params in (("v.json", 1e9), ("u.json", 3e9)):
        (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / "w.json").read_text()) | {"params": params}))
    box = str(tmp_path / "m.json")
    pairs = find_pairs([], [tmp_path / "v.json", tmp_path / "u.json"], [box])
    assert [(job.name, box.name) for job, box in pairs] == [(str(tmp_path / f"{name}.json"), "box") for name in "vu"]
    (alone,) = find_pairs([], [tmp_path / "v.json"], [box])
    assert alone[0].name == "job"
