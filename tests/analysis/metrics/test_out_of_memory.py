"""The explanation of out-of-memory errors: holders that add up, and remedies that claim
no more than the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.metrics.out_of_memory import out_of_memory, shortfall_bytes
from ebbtide.features.advise.trace_advice import with_replayed_offload
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from tests.conftest import ebbtide_in_process

GIB = 1 << 30
AT = 10_000_000


def holder(
    category: str, module: str | None, size: int, device: str = "cuda:0"
) -> dict[str, Any]:
    return {"device": device, "category": category, "module": module, "bytes": size}


def inventory(t_ns: int, reason: str, *holders: dict[str, Any]) -> dict[str, Any]:
    return {
        "t_ns": t_ns,
        "iteration": 2,
        "phase": "forward",
        "reason": reason,
        "holders": list(holders),
    }


STATE = (
    holder("optimizer_state", "layers", 24 * GIB),
    holder("optimizer_state", None, 64, "cpu"),
)
PARAMETERS, GRADIENTS = (
    holder("parameter", "layers", 8 * GIB),
    holder("gradient", "layers", 8 * GIB),
)


def error(**figures: Any) -> dict[str, Any]:
    sizes = {
        "requested_bytes": 4 * GIB,
        "free_bytes": GIB,
        "reserved_bytes": 66 * GIB,
        "allocated_bytes": 60 * GIB,
    }
    place = {
        "t_ns": AT,
        "device": "cuda:0",
        "iteration": 2,
        "phase": "forward",
        "capacity_bytes": 80 * GIB,
    }
    return {**place, **sizes, **figures}


def trace(errors: list[dict[str, Any]], *inventories: dict[str, Any]) -> TraceBuilder:
    builder = TraceBuilder("recorded")
    device = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 80 * GIB}
    rank = builder.rank(
        0, devices=[device], out_of_memory=errors, inventories=list(inventories)
    )
    rank.phase("forward", 0, 5_000_000)
    rank.phase("forward", 8_000_000, 12_000_000)
    return builder


def explained(built: Trace) -> Any:
    result = out_of_memory(built, 0)
    assert result is not None
    return result


def named(result: Any) -> list[tuple[str | None, int]]:
    return [(entry.category, entry.bytes) for entry in result.memory.holders]


def test_out_of_memory__divides_what_was_allocated_by_the_inventory_at_that_time() -> (
    None
):
    at_update = inventory(1, "update", PARAMETERS)
    built = trace(
        [error()],
        at_update,
        inventory(AT, "out of memory", PARAMETERS, GRADIENTS, *STATE),
    ).build()
    result = explained(built)
    assert named(result) == [
        ("optimizer_state", 24 * GIB),
        (None, 20 * GIB),
        ("parameter", 8 * GIB),
        ("gradient", 8 * GIB),
    ]
    assert (result.memory.pool, result.memory.bytes, result.holders_t_ms) == (
        "allocated",
        60 * GIB,
        None,
    )
    assert shortfall_bytes(result.record) == 3 * GIB


def test_out_of_memory__without_an_inventory_of_that_time_takes_no_gradients_of_another() -> (
    None
):
    result = explained(
        trace([error()], inventory(3_000_000, "update", PARAMETERS, GRADIENTS)).build()
    )
    assert named(result) == [(None, 52 * GIB), ("parameter", 8 * GIB)]
    assert result.holders_t_ms == 3.0


def test_out_of_memory__prefers_recorded_allocations_that_reach_the_error() -> None:
    for end_ns, pool in ((9_000_000, "requested"), (6_000_000, "allocated")):
        builder = trace([error()])
        rank = builder.rank(0)
        rank.add(
            "allocations",
            start_ns=0,
            end_ns=None,
            device="cuda:0",
            bytes=40 * GIB,
            category="activation",
        )
        rank.add(
            "allocations",
            start_ns=1,
            end_ns=end_ns,
            device="cuda:0",
            bytes=5,
            category="temporary",
        )
        rank.memory(0, 40 * GIB, "requested")
        result = explained(builder.build())
        assert result.memory.pool == pool
        checkpointing = next(
            r for r in result.remedies if r.name == "activation checkpointing"
        )
        assert checkpointing.bytes == (40 if pool == "requested" else 60) * GIB


def test_remedies__state_what_they_free_against_what_was_missing() -> None:
    result = explained(
        trace([error()], inventory(AT, "out of memory", PARAMETERS, *STATE)).build()
    )
    remedies = {
        remedy.name: (remedy.bytes, remedy.enough) for remedy in result.remedies
    }
    assert remedies == {
        "activation checkpointing": (28 * GIB, True),
        "offload optimizer state": (24 * GIB, True),
        "half the micro-batch": (14 * GIB, True),
        "expandable segments": (6 * GIB, True),
    }
    assert "enough for the 3.00 GiB that were missing" in result.remedies[0].text
    assert all("at most" in remedy.text for remedy in result.remedies)


@pytest.mark.parametrize(
    ("figures", "enough"),
    [
        # Unused segments and free memory together hold the request, or do not.
        ({"requested_bytes": 7 * GIB}, True),
        ({"requested_bytes": 7 * GIB + 1}, False),
        ({"requested_bytes": None}, None),
        ({"reserved_bytes": 60 * GIB}, "no remedy"),
        ({"reserved_bytes": None}, "no remedy"),
    ],
)
def test_remedies__expandable_segments_help_if_the_unused_memory_holds_the_request(
    figures: dict[str, Any], enough: bool | str | None
) -> None:
    remedies = explained(trace([error(**figures)]).build()).remedies
    assert (
        next(
            (r.enough for r in remedies if r.name == "expandable segments"), "no remedy"
        )
        == enough
    )


def test_remedies__offload_is_that_of_the_replayed_plan() -> None:
    builder = trace([error(t_ns=10**10)], inventory(1, "update", *STATE))
    rank = builder.rank(0)
    rank.meta["devices"][0]["name"] = "NVIDIA H100 80GB HBM3"
    rank.meta["model"] = {
        "params": 2 * GIB,
        "bytes": 4 * GIB,
        "dtypes": {"bfloat16": 2 * GIB},
    }
    rank.meta["optimizers"] = [
        {
            "class": "AdamW",
            "params": 2 * GIB,
            "state_bytes": 24 * GIB,
            "state_devices": ["cuda"],
        }
    ]
    for iteration in range(3):
        begin = 20_000_000 + iteration * 900_000_000
        for number, phase in enumerate(("forward", "backward", "update")):
            start = begin + number * 300_000_000
            rank.phase(phase, start, start + 300_000_000, iteration=iteration)
            rank.memory(start, 50 * GIB, "allocated")
    built = builder.build()
    bound = explained(built)
    replayed = with_replayed_offload(built, bound)
    before, after = (
        next(r for r in result.remedies if r.name == "offload optimizer state")
        for result in (bound, replayed)
    )
    assert before.bytes == after.bytes == 24 * GIB
    assert "minus 0 B that the policy pipelined uses there; replayed on" in after.text
    assert after.text != before.text
    # Without an iteration there is nothing to replay.
    short = trace([error()], inventory(AT, "out of memory", *STATE)).build()
    assert with_replayed_offload(short, explained(short)) == explained(short)


def test_memory_at_oom__prints_the_figures_and_says_where_there_are_none(
    tmp_path: Path,
) -> None:
    path = (
        trace([error(), error(phase=None)], inventory(AT, "out of memory", *STATE))
        .write(tmp_path / "run.ebb")
        .path
    )
    text = ebbtide_in_process("memory", path, "--at", "oom").stdout
    assert (
        "ran out of memory on cuda:0 after 10.0 ms, in a phase that is not known of "
        "iteration 2" in text
    )
    assert (
        "requested 4.00 GiB, free 1.00 GiB, reserved by torch 66.00 GiB, allocated "
        "60.00 GiB" in text
    )
    assert "2 errors were recorded; this is the last one" in text
    assert open_trace(path).rank(0).out_of_memory[1].phase is None
    other = trace([]).write(tmp_path / "other.ebb").path
    assert (
        "no out-of-memory error was recorded"
        in ebbtide_in_process("memory", other, "--at", "oom").stdout
    )
    assert (
        '"holders": []'
        in ebbtide_in_process("memory", other, "--at", "oom", "--json").stdout
    )
