"""TraceAnalysis: the figures of the commands, as dataclasses and tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import ebbtide
from ebbtide.analysis import TraceAnalysis
from ebbtide.errors import UserError
from ebbtide.machines.catalog import find_machine
from tests.conftest import ebbtide_in_process, slow_case

RUN = Path(__file__).parents[2] / "traces" / "h100-20b-blocking.ebb"
RUNS = (RUN, slow_case(RUN.with_name("a100-13b-async.ebb")))
# Method -> the command that prints the same, and its list that `to_pandas` makes a
# table of.
METHODS = {
    "summary": ("summary", "phases"),
    "windows": ("windows", "windows"),
    "memory": ("memory", "pools"),
    "link": ("summary --by link", "phases"),
    "findings": ("findings", "findings"),
    "iterations": ("summary --by iteration", "rows"),
    "ranks": ("summary --by rank", "ranks"),
    "substeps": ("summary --by substep", "steps"),
}


@pytest.mark.parametrize("method", METHODS)
def test_results__are_one_line_as_text_and_a_table_in_notebooks(
    analysis: TraceAnalysis, method: str
) -> None:
    result = getattr(analysis, method)()
    assert len(repr(result)) < 100
    assert "\n" not in repr(result)
    assert result._repr_html_().count("<tr>") > 1


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
def test_replay__is_that_of_the_command(run: Path) -> None:
    analysis, policies = (
        TraceAnalysis(ebbtide.open_trace(run)),
        ["zero-offload", "pipelined"],
    )
    command = [
        "replay",
        run,
        *(word for policy in policies for word in ("--policy", policy)),
        "--json",
    ]
    printed = json.loads(ebbtide_in_process(*command).stdout)
    assert json.loads(json.dumps(analysis.replay(policies).as_json())) == printed
    assert list(analysis.replay(policies).to_pandas()["policy"]) == policies
    with pytest.raises(UserError, match="did you mean"):
        analysis.replay(machine="h100-80gbx")


def test_replay__takes_one_policy_and_a_machine(
    analysis: TraceAnalysis, tmp_path: Path
) -> None:
    machine = find_machine("h100-80gb-sxm-published")
    machine.save(tmp_path / "machine.json")
    for given in (machine, tmp_path / "machine.json", "h100-80gb-sxm-published"):
        replayed = analysis.replay("zero-offload", given)
        assert [result.policy for result in replayed.results] == ["zero-offload"]
        assert (replayed.machine, replayed.bound.iteration_s > 0) == (machine, True)
    assert [
        len(repr(value)) < 120
        for value in (replayed.schedules, replayed.schedules[0].plan)
    ] == [True, True]


def test_dir__has_public_names_only(analysis: TraceAnalysis) -> None:
    assert {"summary", "findings", "replay", "plot", "windows"} <= set(dir(analysis))
    assert not [name for name in dir(analysis) if name.startswith("_")]


@pytest.fixture(scope="module")
def analysis() -> TraceAnalysis:
    return TraceAnalysis(ebbtide.open_trace(RUN))


def call(analysis: TraceAnalysis, method: str) -> Any:
    function: Callable[[], Any] = getattr(analysis, method)
    return function()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
@pytest.mark.parametrize("method", [*METHODS, "activity"])
def test_method__gives_what_the_command_prints(run: Path, method: str) -> None:
    command = "summary --by activity" if method == "activity" else METHODS[method][0]
    printed = json.loads(ebbtide_in_process(*command.split(), run, "--json").stdout)
    analysis = TraceAnalysis(ebbtide.open_trace(run))
    assert json.loads(json.dumps(call(analysis, method).as_json())) == printed
    if method == "summary":
        assert (
            json.loads(json.dumps(analysis.gpu().as_json()))["gpu"] or None
        ) == printed["gpu"]


@pytest.mark.parametrize("method", METHODS)
def test_to_pandas__has_a_row_for_each_entry_and_every_value(
    analysis: TraceAnalysis, method: str
) -> None:
    result = call(analysis, method)
    table, entries = result.to_pandas(), result.as_json()[METHODS[method][1]]
    assert len(table) == len(entries) > 0
    for (_, row), entry in zip(table.iterrows(), entries, strict=True):
        for name, value in entry.items():
            # Settings and series are no figures.
            if name in ("action", "iterations_ms"):
                continue
            nested = (
                {f"{name}_{field}": part for field, part in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            for column, expected in nested.items():
                if expected is None:
                    assert pd.isna(row[column])
                else:
                    assert row[column] == expected


def test_to_pandas__keeps_columns_and_types_without_rows(
    analysis: TraceAnalysis,
) -> None:
    assert analysis.windows("1GiB").as_json() == analysis.windows(2**30).as_json()
    some, none = (
        analysis.windows(2**30).to_pandas(),
        analysis.windows(2**50).to_pandas(),
    )
    assert len(none) == 0
    assert list(none.dtypes.items()) == list(some.dtypes.items())


def test_ranks__select(analysis: TraceAnalysis) -> None:
    assert {window.rank for window in analysis.windows(ranks=0).windows} == {0}
    assert set(analysis.link([2]).to_pandas()["rank"]) == {2}
    assert set(analysis.iterations([1, 3]).to_pandas()["rank"]) == {1, 3}


def test_missing_data__is_named_with_what_to_record() -> None:
    analysis = TraceAnalysis(
        ebbtide.open_trace(RUN.with_name("a100-torch-profiler.ebb"))
    )
    windows = analysis.windows()
    assert (windows.windows, windows.pool) == ([], None)
    (missing,) = windows.missing
    assert "`ebbtide profile` records it" in missing


def test_repr__names_the_trace(analysis: TraceAnalysis) -> None:
    assert (
        repr(analysis.trace)
        == f"Trace({str(RUN)!r}, source='imported', state='complete', ranks=[0, 1, 2, 3])"
    )
    assert repr(analysis) == f"TraceAnalysis({analysis.trace!r})"


def test_import__loads_nothing_else() -> None:
    code = (
        "import sys, ebbtide, ebbtide.analysis; print(*{'numpy', 'pandas', 'pyarrow', "
        "'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == ""


def test_plot__draws_a_kind_and_refuses_others(analysis: TraceAnalysis) -> None:
    assert [axes.get_ylabel() for axes in analysis.plot("memory").axes] == [
        "memory (GiB)",
        "host memory (GiB)",
    ]
    with pytest.raises(UserError, match="is no kind of picture"):
        analysis.plot("pie")
