"""`compare --layers`: the same job under each choice for its layers, measured beside
predicted."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from ebbtide.errors import UserError
from ebbtide.features.layers.compare import (
    CHOICES,
    WARMUP,
    LayerComparison,
    compare_layers,
)
from ebbtide.features.layers.comparison import comparison_view, draw_comparison
from ebbtide.interleave.compare.compare import CompareConfig
from ebbtide.interleave.compare.runs import PhaseWaits
from tests.cli.test_json_schemas import schema, strict
from tests.interleave.quick_plans import plan_quickly

FEW = (("keep", "resident"), ("offload", "streamed"), ("auto", "auto"))


@pytest.fixture(
    scope="module",
    params=[FEW, pytest.param(CHOICES, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def layer_comparison(request: pytest.FixtureRequest) -> LayerComparison:
    with pytest.MonkeyPatch.context() as patched:
        plan_quickly(patched)
        waits = PhaseWaits(0.01, 0.02)
        config = CompareConfig(
            params=200_000, iterations=WARMUP + 2, link_bytes_per_s=4e7, waits=waits
        )
        return compare_layers(config, choices=request.param)


def test_compare_layers__moves_the_bytes_of_the_plan_within_its_memory(
    layer_comparison: LayerComparison,
) -> None:
    assert layer_comparison.losses_equal
    for run in layer_comparison.runs:
        # Saved tensors that the job holds itself do not move; recomputation saves some
        # of a layer at a time.
        assert run.device_bytes.ratio == pytest.approx(1, abs=0.1), run.name
        ratios = [
            pair.ratio
            for pair in map(run.moved_bytes, ("h2d", "d2h"))
            if pair is not None
        ]
        assert ratios == pytest.approx([1, 1], abs=0.02), run.name
        if "auto" in run.name:
            assert run.device_bytes.measured <= layer_comparison.memory_budget
    bytes_of = {run.name: run.device_bytes.measured for run in layer_comparison.runs}
    assert bytes_of["offload, streamed"] < 0.5 * bytes_of["keep, resident"]


def test_compare_layers__has_a_schema(layer_comparison: LayerComparison) -> None:
    printed = json.loads(json.dumps(layer_comparison.as_json()))
    assert [
        *Draft202012Validator(strict(schema("compare-layers"))).iter_errors(printed)
    ] == []


def test_compare_layers__is_a_table_and_a_picture(
    layer_comparison: LayerComparison,
) -> None:
    *_, table, _ = comparison_view(layer_comparison, verbose=False)
    count = len(layer_comparison.runs)
    assert len(table.all_rows) == count
    figure = draw_comparison(layer_comparison)
    axes = figure.axes
    # One legend for both halves, of what there is.
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(figure.legends) == 1
    assert not any(half.legends for half in figure.subfigs)
    assert {"memory: weights", "memory: activations", "weights up"} <= set(labels)
    assert "memory: optimizer state" not in labels
    # Memory and lanes, measured and predicted.
    assert len(axes) == 4 * count
    titles = [one.get_title(loc="left") for one in axes]
    assert (
        sum("measured" in title for title in titles)
        == sum("predicted" in title for title in titles)
        == count
    )


@pytest.mark.parametrize(
    ("steps", "budget", "message"),
    [(4, None, "--steps must be at least 6"), (6, 1e3, "budget is 1000")],
)
def test_compare_layers__bad_input(
    steps: int, budget: float | None, message: str
) -> None:
    waits = PhaseWaits(0.001, 0.001)
    config = CompareConfig(
        params=100_000,
        iterations=steps,
        memory_budget=budget,
        link_bytes_per_s=4e8,
        waits=waits,
    )
    with pytest.raises(UserError, match=message):
        compare_layers(config, choices=(("auto", "auto"),))
