"""The rows of a sweep: equal to those of single replays, in order, in any number of
processes."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ebbtide.features.sweep.best import SCHEMA, find_best, write_rows
from ebbtide.features.sweep.task import (
    Row,
    Scenario,
    Task,
    find_pairs,
    run_task,
)
from ebbtide.interleave.replay.replay import replay
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import StoragePath
from tests.features.sweep.sweeps import rows, tasks
from tests.interleave.job_files import machine, workload, write_files

FAST = ["zero-offload", "twin-flow:0.5", "interleaved:2"]


def test_run_task__the_row_has_the_figures_of_the_replay() -> None:
    small_host = replace(workload(), host_free_bytes=20e9)
    rates = replace(
        machine(), storage=(StoragePath(2e9, 1e9), StoragePath(1e9, 1e9, 1e12))
    )
    job = Scenario(free_bytes=9e9).apply_to(small_host)
    (row,) = rows(["interleaved:2"], [Scenario(free_bytes=9e9)], [small_host], [rates])
    expected = replay(job, rates, ["interleaved:2"]).as_json()
    (result,) = expected["results"]
    busy = result.pop("busy")
    assert result.pop("storage_busy")
    assert [
        result.pop(key) for key in ("weights", "activations", "job_peak_device_bytes")
    ] == [None] * 3
    assert result["stored_subgroups"] > 0
    assert {name: row[name] for name in result} == result
    assert {name: row[f"{name}_busy_share"] for name in busy} == busy
    assert set(busy) > {"cpu", "storage_read", "storage_write"}
    assert {name: row[f"bound_{name}"] for name in expected["bound"]} == expected[
        "bound"
    ]
    assert (row["workload"], row["machine"], row["error"]) == ("job", "box", None)
    assert (row["params"], row["subgroups"], row["least_free_bytes"]) == (
        2_000_000_000,
        20,
        9e9,
    )
    # The table has all of them.
    assert set(row) == set(SCHEMA.names)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            tasks(["adaptive"], workloads=[workload(gpu_free_bytes=None)]),
            "what device memory is free",
        ),
        (tasks(["twin-flow"]), "lacks the share"),
        (
            tasks(["gpu-only"], machines=[machine(gpu_update_params_per_s=None)]),
            "gpu_update_params_per_s",
        ),
        (tasks(["zero-offload"], [Scenario(scale_params=3)]), "do not fit"),
        (
            tasks(["zero-offload"], workloads=[replace(workload(), params="many")]),
            "TypeError",
        ),  # type: ignore[arg-type]
    ],
    ids=["policy", "value", "machine", "scenario", "fault"],
)
def test_run_task__a_combination_that_cannot_be_replayed_has_an_error(
    task: list[Task], message: str
) -> None:
    row = run_task(*task)
    assert message in row["error"]
    scenario = {field.name for field in fields(Scenario)}
    assert set(row) == {"workload", "machine", "policy", *scenario, "error"}


def test_combinations__without_policies_are_those_of_a_replay() -> None:
    replayed = replay(workload(params=2e8), machine())
    assert replayed.late is not None
    results = [*replayed.results, *replayed.late.results]
    assert [task.policy.text for task in tasks([])] == [
        *[result.policy for result in results],
        *replayed.skipped,
    ]


def test_write_rows__writes_all_rows_workloads_and_machines(tmp_path: Path) -> None:
    sweep_tasks = tasks(
        [*FAST, "twin-flow"],
        machines=[machine(), machine(name="other", host_memory_bytes=None)],
    )
    actual = [run_task(task) for task in sweep_tasks]
    write_rows(actual, sweep_tasks, tmp_path / "table")
    table = pq.read_table(tmp_path / "table")
    assert [
        {name: row.get(name) for name in SCHEMA.names} for row in actual
    ] == table.to_pylist()
    metadata = json.loads(table.schema.metadata[b"ebbtide"])
    assert [entry["name"] for entry in metadata["machines"]] == ["box", "other"]
    assert metadata["workloads"][0]["params"] == 2_000_000_000


def make_row(
    policy: str, iteration: float, fits: bool | None = True, **changes: object
) -> Row:
    return {
        "workload": "job",
        "machine": "box",
        **asdict(Scenario()),
        "policy": policy,
        "iteration_ms": iteration,
        "bound_overlap_iteration_ms": 80.0,
        "fits": fits,
        "exact": True,
        "error": None,
    } | changes


def test_find_best__is_the_fastest_that_fits() -> None:
    actual = [
        make_row("zero-offload", 200.0),
        make_row("a", 100.0),
        make_row("b", 90.0, None),
        make_row("c", 50.0, False),
    ]
    (best,) = find_best(actual)
    assert best.row is actual[1]
    assert best.speed_up == 2
    assert best.above_bound == pytest.approx(0.25)


def test_find_best__is_exact_if_any_is() -> None:
    actual = [make_row("fast", 10.0, exact=False), make_row("exact", 100.0, None)]
    assert [best.row for best in find_best(actual)] == [actual[1]]
    assert [best.row for best in find_best(actual[:1])] == [actual[0]]


def test_run_task__works_on_presets_with_totals_of_their_host() -> None:
    (row,) = rows(["zenflow:0.1"], machines=[preset("a100-40gb-published")])
    assert row["error"] is None
    assert row["exact"] is False
    assert row["note"].startswith("90 % of each gradient")


def test_find_best__one_that_may_fit_comes_before_none() -> None:
    actual = [
        make_row("b", 90.0, None),
        make_row("c", 50.0, False),
        make_row("d", 10.0) | {"error": "no"},
    ]
    (best,) = find_best(actual)
    assert best.row is actual[0]
    assert best.speed_up is None
    (none,) = find_best(actual[1:])
    assert (none.row, none.speed_up, none.above_bound) == (None, None, None)
    assert none.as_json()["policy"] is None


def test_find_best__is_over_policies_and_subgroups_of_each_scenario() -> None:
    actual = [
        make_row(policy, iteration - size, subgroup_params=size, free_bytes=free)
        for free in (1.0, None)
        for size in (10, 20)
        for policy, iteration in (("zero-offload", 220.0), ("a", 120.0))
    ]
    bests = find_best(actual)
    assert [best.group["free_bytes"] for best in bests] == [1.0, None]
    assert [best.row and best.row["subgroup_params"] for best in bests] == [20, 20]
    # Over the baseline with the same subgroups.
    assert [best.speed_up for best in bests] == [2.0, 2.0]


def test_find_pairs__workloads_with_the_same_name_are_named_by_their_paths(
    tmp_path: Path,
) -> None:
    write_files(tmp_path)
    for name, params in (("v.json", 1e9), ("u.json", 3e9)):
        (tmp_path / name).write_text(
            json.dumps(
                json.loads((tmp_path / "w.json").read_text()) | {"params": params}
            )
        )
    machine_file = str(tmp_path / "m.json")
    pairs, _ = find_pairs(
        [], [tmp_path / "v.json", tmp_path / "u.json"], [machine_file]
    )
    assert [(job.name, rates.name) for job, rates, _ in pairs] == [
        (str(tmp_path / f"{name}.json"), "box") for name in "vu"
    ]
    ((alone,), _) = find_pairs([], [tmp_path / "v.json"], [machine_file])
    assert alone[0].name == "job"


def test_sweep__policies_with_overlap_on_a_machine_with_a_box() -> None:
    policies = ["pipelined", "pipelined,overlap=forward", "pipelined,overlap=auto"]
    small = workload(params=4e8)
    without, late, auto = rows(
        policies, workloads=[small], machines=[preset("h100-80gb-sxm-published")]
    )
    assert [row["policy"] for row in (without, late, auto)] == policies
    assert all(row["error"] is None for row in (without, late, auto))
    assert auto["iteration_ms"] < late["iteration_ms"] < without["iteration_ms"]
    assert (late["bound_overlap"], late["speculated_subgroups"]) == ("forward", 0)
    assert auto["speculated_subgroups"] > 0
    assert auto["redone_iteration_ms"] > auto["iteration_ms"]
