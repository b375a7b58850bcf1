"""Tests of what is said of the accuracy of predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.features.advise.ranges import residual_factor
from ebbtide.machines.accuracy import accuracy_of, uncertainty_of
from ebbtide.machines.catalog import find_machine, preset, presets
from ebbtide.machines.machine import Box, Machine

FIT: dict[str, Any] = {
    "residuals": {"a": 0.01, "b": -0.037},
    "ranks": {"a": 1, "b": 2},
    "unidentified": ["h2d_bytes_per_s"],
    "rates": {"cpu_update_params_per_s": 1e9},
}


def test_accuracy_of__a_fitted_machine_has_the_largest_error_and_undetermined_rates() -> (
    None
):
    accuracy = accuracy_of(Machine(cpu_update_params_per_s=1e9, extra={"fit": FIT}))
    assert (accuracy.basis, accuracy.runs, accuracy.largest_error) == (
        "fitted",
        2,
        0.037,
    )
    assert accuracy.undetermined == ("h2d_bytes_per_s",)
    assert "within 3.7 % on the 2 runs it was fitted to" in accuracy.text()


def test_accuracy_of__a_fit_says_nothing_of_other_rates(tmp_path: Path) -> None:
    fitted = preset("a100-40gb-published")
    for ranks in (1, 2, 4):
        assert accuracy_of(fitted.for_ranks(ranks)).largest_error is not None
    assert fitted.h2d_bytes_per_s
    assert fitted.cpu_update_params_per_s
    changes: dict[str, Any] = {
        "h2d_bytes_per_s": fitted.h2d_bytes_per_s / 2,
        "duplex_bytes_per_s": 30e9,
    }
    replace(
        fitted, **changes, cpu_update_params_per_s=fitted.cpu_update_params_per_s / 2
    ).save(tmp_path / "m.json")
    edited = accuracy_of(find_machine(str(tmp_path / "m.json")))
    assert (edited.basis, edited.largest_error) == ("fitted", None)
    assert "does not say how well with these rates" in edited.text()
    for change in (
        {"step_overhead_s": 0.1},
        {"duplex_bytes_per_s": 3e10},
        {"gpu_update_params_per_s": None},
    ):
        assert accuracy_of(replace(fitted, **change)).largest_error is None
    assert residual_factor("zero-offload", fitted) is not None
    assert residual_factor("zero-offload", replace(fitted, step_overhead_s=0.1)) is None
    without_rates = {
        key: value for key, value in fitted.extra["fit"].items() if key != "rates"
    }
    assert (
        accuracy_of(replace(fitted, extra={"fit": without_rates})).largest_error is None
    )


@pytest.mark.parametrize(("ranks", "validated"), [(1, True), (2, True), (4, False)])
def test_accuracy_of__numbers_of_ranks_that_no_run_had_are_not_validated(
    ranks: int, validated: bool
) -> None:
    machine = Machine(
        cpu_update_params_per_s=1e9, box=Box(2, 2e9), extra={"fit": FIT}
    ).for_ranks(ranks)
    text = accuracy_of(machine).text()
    assert (
        f"which had 1 and 2 ranks on a host: not validated with {ranks}" in text
    ) != validated


def test_accuracy_of__other_machines_are_not_validated() -> None:
    for extra, basis, text in [
        ({}, "unknown", "does not say where its rates are from"),
        (
            {"measured": {"h2d_bytes_per_s": {"how": "copies"}}},
            "measured",
            "not validated against a run",
        ),
        ({"source": {"kind": "data sheets"}}, "data sheets", "rates from data sheets"),
        ({"source": {"kind": "measured by hand"}}, "unknown", "not validated"),
        ({"fit": {"residuals": {}, "note": "lost"}}, "fitted", "not validated"),
        # Files of users may have anything under these keys.
        ({"fit": [0.1], "source": "me", "measured": 7}, "unknown", "not validated"),
        (
            {"fit": {"residuals": {"a": "small"}, "ranks": [1]}},
            "fitted",
            "not validated",
        ),
    ]:
        accuracy = accuracy_of(Machine(extra=extra))
        assert (
            accuracy.basis,
            accuracy.largest_error,
            accuracy.as_json()["basis"],
        ) == (basis, None, basis)
        assert text in accuracy.text()


def test_accuracy_of__presets_state_their_basis() -> None:
    assert {accuracy_of(preset(name)).basis for name in presets()} <= {
        "fitted",
        "data sheets",
    }
    fitted = preset("a100-40gb-published")
    assert accuracy_of(fitted).largest_error == max(
        map(abs, fitted.extra["fit"]["residuals"].values())
    )
    assert accuracy_of(replace(fitted, extra={})).basis == "unknown"


def test_accuracy_of__data_sheets_name_their_least_certain_rate() -> None:
    extra = {
        "source": {"kind": "data sheets"},
        "uncertainty": {"h2d_bytes_per_s": 1.2, "operation_s": 3.0},
    }
    accuracy = accuracy_of(Machine(extra=extra))
    assert "the least certain within a factor of 3 (operation_s)" in accuracy.text()
    assert accuracy.as_json()["uncertainty"] == extra["uncertainty"]


def test_uncertainty_of__comes_from_the_fit_the_data_sheets_or_the_spread_of_runs() -> (
    None
):
    fitted = preset("h100-80gb-sxm-published")
    assert uncertainty_of(fitted) == fitted.extra["fit"]["uncertainty"]
    measured = {
        "h2d_bytes_per_s": {"how": "copies", "spread": 0.512},
        "d2h_bytes_per_s": {"spread": 0.01},
    }
    # The 10th and the 90th percentile are 2.56 standard errors apart.
    assert uncertainty_of(Machine(extra={"measured": measured})) == {
        "h2d_bytes_per_s": pytest.approx(1.2, rel=1e-3),
        "d2h_bytes_per_s": 1.05,
    }
    assert uncertainty_of(Machine()) == {}
    assert (
        uncertainty_of(
            Machine(
                extra={
                    "uncertainty": {"a": "x", "b": 0.5, "c": None, "d": float("nan")}
                }
            )
        )
        == {}
    )
