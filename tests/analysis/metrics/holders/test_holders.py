"""Holders of memory, of made allocations and of published snapshots."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from ebbtide.analysis.metrics.holders.categories import (
    call_site,
    categorized_allocations,
    in_loss,
    part_of_step,
)
from ebbtide.analysis.metrics.holders.holders import (
    Holder,
    holders_at,
    memory_by_category,
)
from ebbtide.features.importers.source import Source
from ebbtide.features.importers.torch_memory.snapshot import import_snapshot
from ebbtide.profiler.trace import Trace, TraceBuilder

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "snapshots"
LIBRARY = "/env/lib/python3.11/site-packages/torch"
MODULE_CALL = f"_call_impl ({LIBRARY}/nn/modules/module.py:1750)"
FORWARD = (
    f"main (/job/train.py:9)\n{MODULE_CALL}\nforward (/job/model.py:3)\nlinear "
    f"({LIBRARY}/nn/functional.py:5)"
)
BACKWARD = "autograd engine\nMulBackward0"
STEP = (
    f"main (/job/train.py:9)\nwrapper ({LIBRARY}/optim/optimizer.py:493)\nstep "
    f"({LIBRARY}/optim/adamw.py:80)"
)
MODEL = (
    f"main (/job/train.py:2)\nto ({LIBRARY}/nn/modules/module.py:1300)\n_apply "
    f"({LIBRARY}/nn/modules/module.py:900)"
)


def job(**columns: object) -> Trace:
    """Return a trace of one step: the forward from 10, the backward from 20, the
    optimizer from 30 to 40."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    rows = [
        (0, None, 1000, MODEL),
        (0, None, 64, None),
        (10, 35, 300, FORWARD),
        (11, 12, 200, FORWARD),
        (20, 45, 500, BACKWARD),
        (21, 25, 100, BACKWARD),
        (30, None, 800, STEP),
        (31, 32, 50, STEP),
    ]
    for start, end, size, stack in rows:
        rank.add(
            "allocations",
            start_ns=start,
            end_ns=end,
            device="cuda:0",
            bytes=size,
            stack=stack,
            **columns,
        )
    changes = sorted(
        [(start, size) for start, _, size, _ in rows]
        + [(end, -size) for _, end, size, _ in rows if end]
    )
    for number, (t_ns, _) in enumerate(changes):
        rank.memory(t_ns, sum(size for _, size in changes[: number + 1]), "requested")
    rank.add("annotations", start_ns=30, end_ns=40, name="Optimizer.step#AdamW.step")
    return builder.build()


def test_categorized_allocations__follow_from_stack_and_lifetime() -> None:
    rows = categorized_allocations(job(), 0, "cuda:0")
    assert rows["category"].astype(object).fillna("not known").tolist() == [
        "parameter",
        "not known",
        "activation",
        "temporary",
        "gradient",
        "temporary",
        "optimizer_state",
        "temporary",
    ]


def test_categorized_allocations__follow_parameters_through_data() -> None:
    """A module makes two parameters by itself; an optimizer makes moments, and replaces
    one of them in each step."""
    init = "main (/job/train.py:2)\n__init__ (/job/model.py:7)"
    rank = (builder := TraceBuilder()).rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda"}]
    )
    rows = [
        (0, 33, 400, init, "parameter"),
        (1, None, 400, init, "parameter"),
        (2, 3, 400, init, "temporary"),
        (10, 35, 400, FORWARD, "activation"),
        (20, 45, 400, BACKWARD, "gradient"),
        (30, None, 400, STEP, "optimizer_state"),
        (31, None, 300, STEP, "optimizer_state"),
        (32, 63, 400, STEP, "parameter"),
        (34, None, 400, STEP, "optimizer_state"),
        (62, None, 400, STEP, "parameter"),
    ]
    for start, end, size, stack, _ in rows:
        rank.add(
            "allocations",
            start_ns=start,
            end_ns=end,
            device="cuda:0",
            bytes=size,
            stack=stack,
        )
    for start in (30, 60):
        rank.add(
            "annotations",
            start_ns=start,
            end_ns=start + 10,
            name="Optimizer.step#Own.step",
        )
    categories = categorized_allocations(builder.build(), 0, "cuda:0")[
        "category"
    ].tolist()
    assert categories == [row[-1] for row in rows]


def test_categorized_allocations__keep_recorded_categories() -> None:
    assert set(
        categorized_allocations(job(category="gradient"), 0, "cuda:0")["category"]
    ) == {"gradient"}


def test_categorized_allocations__say_nothing_of_what_may_not_be_training() -> None:
    rank = TraceBuilder()
    rank.rank(0).add(
        "allocations",
        start_ns=0,
        device="cuda:0",
        bytes=1,
        stack="main (/job/serve.py:9)",
    )
    rank.rank(0).add("allocations", start_ns=1, device="cuda:0", bytes=1, stack=FORWARD)
    category = categorized_allocations(rank.build(), 0, "cuda:0")["category"]
    assert (category.isna().tolist(), category[1]) == ([True, False], "activation")


def test_holders_at__the_peak_are_the_blocks_held_then() -> None:
    holders = holders_at(job(), 0)
    assert holders is not None
    assert (holders.pool, holders.device, holders.t_ms, holders.bytes) == (
        "requested",
        "cuda:0",
        31e-6,
        2714,
    )
    assert holders.holders == [
        Holder("parameter", None, "main (/job/train.py:2)", 1000),
        Holder("optimizer_state", None, "main (/job/train.py:9)", 800),
        Holder("gradient", None, "backward of MulBackward0", 500),
        Holder("activation", None, "forward (/job/model.py:3)", 300),
        Holder(None, None, "allocated before the recording", 64),
        Holder("temporary", None, "main (/job/train.py:9)", 50),
    ]
    assert holders.by("category")[0] == ("parameter", 1000)


def test_holders_at__a_time() -> None:
    holders = holders_at(job(), 0, 11)
    assert holders is not None
    assert {(holder.category, holder.bytes) for holder in holders.holders} == {
        ("parameter", 1000),
        ("activation", 300),
        ("temporary", 200),
        (None, 64),
    }
    assert holders_at(job(), 0, -1) is None
    assert holders_at(job(), 0, 11, "cuda:1") is None


@pytest.mark.parametrize(("at_ns", "gradients"), [(5, False), (12, True)])
def test_holders_at__counts_recorded_gradients_in_updates(
    at_ns: int, gradients: bool
) -> None:
    entries = [
        ("parameter", "layer", 40),
        ("gradient", "layer", 20),
        ("optimizer_state", "layer", 30),
    ]
    holders_meta = [
        {"device": "cuda:0", "category": category, "module": module, "bytes": size}
        for category, module, size in entries
    ]
    builder = TraceBuilder("recorded")
    inventories = [
        {
            "t_ns": 10,
            "iteration": 0,
            "phase": "update",
            "reason": "update",
            "holders": holders_meta,
        }
    ]
    rank = builder.rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda"}], inventories=inventories
    )
    rank.phase("backward", 0, 10, 0).phase("update", 10, 15, 0).memory(
        0, 100, "allocated"
    )
    holders = holders_at(builder.build(), 0, at_ns)
    assert holders is not None
    listed = [
        Holder(*entry[:2], None, entry[2])
        for entry in entries
        if gradients or entry[0] != "gradient"
    ]
    rest = Holder(None, None, None, 100 - sum(holder.bytes for holder in listed))
    assert holders.holders == sorted([*listed, rest], key=lambda holder: -holder.bytes)


@pytest.mark.parametrize(
    "name", ["cs336-ctx128-forward", "cs336-ctx128-fullstep", "snapviewer-memory"]
)
def test_holders_at__add_up_to_the_peak_of_a_replay_of_published_snapshots(
    name: str,
) -> None:
    path = PUBLISHED / f"{name}.pickle"
    if not path.exists():
        pytest.skip("the published measurements are not here (shared/published)")
    builder = TraceBuilder()
    import_snapshot(Source(path), builder, 0)
    trace = builder.build()
    snapshot = pickle.loads(path.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    size = sum(
        block["requested_size"]
        for block in blocks
        if block["state"] == "active_allocated"
    )
    actions = {event["action"] for event in snapshot["device_traces"][0]}
    release = "free_requested" if "free_requested" in actions else "free_completed"
    peak = size
    for event in reversed(snapshot["device_traces"][0]):
        size += event["size"] * (
            (event["action"] == release) - (event["action"] == "alloc")
        )
        peak = max(peak, size)
    holders = holders_at(trace, 0)
    assert holders is not None
    assert holders.bytes == peak == sum(holder.bytes for holder in holders.holders)
    timelines = memory_by_category(trace, 0, "cuda:0")
    at_ns = trace.span_ns()[0] + round(holders.t_ms * 1e6)  # type: ignore[index]
    live = {
        category: int(sizes[np.searchsorted(times, at_ns, side="right") - 1])
        for category, (times, sizes) in timelines.items()
        if times[0] <= at_ns
    }
    assert {category: size for category, size in live.items() if size} == dict(
        holders.by("category")
    )


def test_holders_at__knows_the_model_of_a_published_snapshot() -> None:
    """The step of AdamW: gradients as large as the parameters, fp32 moments twice
    (published/README.md)."""
    path = PUBLISHED / "cs336-ctx128-fullstep.pickle"
    if not path.exists():
        pytest.skip("the published measurements are not here (shared/published)")
    builder = TraceBuilder()
    import_snapshot(Source(path), builder, 0)
    holders = holders_at(builder.build(), 0)
    assert holders is not None
    layer = 4 * 2560**2 + 3 * 2560 * 10240 + 2 * 2560
    params = 32 * layer + 2 * 10000 * 2560 + 2560
    by_category = dict(holders.by("category"))
    assert by_category["optimizer_state"] == 8 * params
    assert by_category["gradient"] == 4 * params


STACKS = [
    (FORWARD, "forward", "forward (/job/model.py:3)"),
    (BACKWARD, "backward", "backward of MulBackward0"),
    (
        f"{BACKWARD}\nrecompute (/job/model.py:8)",
        "backward",
        "recompute (/job/model.py:8)",
    ),
    ("autograd engine", "backward", "backward"),
    (f"{BACKWARD}\ncuBLAS workspace", "library", "cuBLAS workspace"),
    (STEP, "step", "main (/job/train.py:9)"),
    (
        "main (/job/train.py:9)\n"
        "_wrap_update (ebbtide/profiler/agent/phase_hooks.py.importlib._bootstrap:8)\n"
        "adam (torch/optim/adam.py:902)",
        "step",
        "main (/job/train.py:9)",
    ),
    (MODEL, "model", "main (/job/train.py:2)"),
    (
        f"run ({LIBRARY}/a.py:1)\nlinear ({LIBRARY}/b.py:5)",
        "forward",
        f"linear ({LIBRARY}/b.py:5)",
    ),
]


def test_stacks__tell_part_and_call_site() -> None:
    for stack, part, site in STACKS:
        assert (part_of_step(stack), call_site(stack)) == (part, site)


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (f"main (/job/train.py:9)\ncross_entropy ({LIBRARY}/functional.py:5)", True),
        (
            f"train ({LIBRARY}/trainer.py:9)\nForCausalLMLoss "
            f"({LIBRARY}/loss_utils.py:5)",
            True,
        ),
        ("autograd engine\nLogSoftmaxBackward0", True),
        (FORWARD, False),
        (BACKWARD, False),
    ],
)
def test_in_loss__knows_losses_and_their_backward(stack: str, expected: bool) -> None:
    assert in_loss(stack) is expected
