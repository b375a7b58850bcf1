"""Kinds of operations: those of the core, and others that a feature plugs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ebbtide import seams
from ebbtide.errors import PlanError
from ebbtide.interleave.model.kinds import Flow, Kind, find_kind, kinds, no_rates
from ebbtide.interleave.model.operations import BACKWARD, Op
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from tests.interleave.job_files import machine, workload

COMPRESSION_S = 0.25
COMPRESSION = Kind(
    "compress",
    ("cpu",),
    seconds=lambda op, rates: COMPRESSION_S,
    rates=no_rates,
    host_bytes=lambda op, workload: 0.0,
)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kind]]:
    """Kinds that a feature adds, besides those that are there."""
    added: list[Kind] = []
    load_all = seams.load_all
    monkeypatch.setattr(
        seams,
        "load_all",
        lambda seam: [*load_all(seam), *([added] if seam == "kinds" else [])],
    )
    kinds.cache_clear()
    yield added
    kinds.cache_clear()


def test_kinds__of_a_feature_are_checked_and_simulated(plugged: list[Kind]) -> None:
    plugged.append(COMPRESSION)
    plan = make_plan("pipelined", workload(), machine())
    first = next(
        index for index, op in enumerate(plan.ops) if op.kind == "gradient down"
    )
    op = Op(
        "compress",
        "cpu",
        plan.ops[first].subgroup,
        params=0,
        nbytes=0.0,
        start=BACKWARD,
        after=(first,),
    )
    longer = replace(plan, ops=(*plan.ops, op))
    schedule = simulate(longer.validate(workload()), workload(), machine())
    assert schedule.ends[-1] - schedule.starts[-1] == pytest.approx(COMPRESSION_S)
    with pytest.raises(PlanError, match="cannot run on h2d"):
        replace(plan, ops=(*plan.ops, op._replace(resource="h2d"))).validate(workload())


def test_kinds__of_a_feature_take_part_in_the_data_flow(plugged: list[Kind]) -> None:
    """One kind makes what another one sends, of the gradient on the host."""
    made, sent = "compressed@host", "compressed@other"
    plugged.append(
        replace(COMPRESSION, flow=lambda op, plan: Flow(("grad@host",), (made,)))
    )
    plugged.append(
        replace(
            COMPRESSION,
            name="send",
            flow=lambda op, plan: Flow(writes=(sent,), moves=(made,)),
        )
    )
    plan = make_plan("pipelined", workload(), machine())
    down = next(
        index for index, op in enumerate(plan.ops) if op.kind == "gradient down"
    )
    count, subgroup = len(plan.ops), plan.ops[down].subgroup
    compress = Op(
        "compress", "cpu", subgroup, params=0, nbytes=0.0, start=BACKWARD, after=(down,)
    )
    send = compress._replace(kind="send", after=(count,))
    replace(plan, ops=(*plan.ops, compress, send)).validate(workload())
    for ops, message in (
        (
            (compress._replace(after=()), send),
            f"compress of subgroup {subgroup} does not wait for gradient down",
        ),
        (
            (compress, send._replace(after=(down,))),
            f"send of subgroup {subgroup} does not wait for compress",
        ),
        (
            (send._replace(after=(down,)),),
            f"send of subgroup {subgroup} finds no compressed@host",
        ),
        (
            (compress, compress),
            "is repeated, or fills compressed@host, which is not empty",
        ),
        (
            (compress, send, send),
            f"send of subgroup {subgroup} finds no compressed@host",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            replace(plan, ops=(*plan.ops, *ops)).validate(workload())


def test_kinds__that_change_what_others_have_read_wait_for_these(
    plugged: list[Kind],
) -> None:
    plugged.append(
        replace(COMPRESSION, flow=lambda op, plan: Flow(("grad@host",), ("grad@host",)))
    )
    plan = make_plan("pipelined", workload(), machine())
    down = next(
        index for index, op in enumerate(plan.ops) if op.kind == "gradient down"
    )
    subgroup, count = plan.ops[down].subgroup, len(plan.ops)
    update = next(
        index
        for index, op in enumerate(plan.ops)
        if op.kind == "update" and op.subgroup == subgroup
    )
    op = Op(
        "compress",
        "cpu",
        subgroup,
        params=0,
        nbytes=0.0,
        start=BACKWARD,
        after=(update,),
    )
    replace(plan, ops=(*plan.ops, op, op._replace(after=(count,)))).validate(workload())
    with pytest.raises(
        PlanError, match=f"compress of subgroup {subgroup} does not wait for clip"
    ):
        replace(plan, ops=(*plan.ops, op._replace(after=(down,)))).validate(workload())


def test_kinds__read_only_what_some_kind_writes_or_the_iteration_begins_with() -> None:
    plan = make_plan("pipelined", workload(), machine())
    flows = [
        kind.flow(
            Op(kind.name, resource, 0, params=0, nbytes=0.0, start=BACKWARD, tag=0),
            plan,
        )
        for kind in kinds().values()
        for resource in kind.resources
    ]
    written = {place for flow in flows for place in flow.writes}
    used = {
        place for flow in flows for place in (*flow.reads, *flow.moves, *flow.reads_all)
    }
    # Masters are on their way to be converted only in plans that convert on the GPU.
    assert used - written == {"grad@job", "master@gpu"}


def test_find_kind__names_all_kinds_where_there_is_none_of_a_name() -> None:
    with pytest.raises(
        PlanError,
        match="there is no operation 'compress': gradient down, gradient up, clip",
    ):
        find_kind("compress")


def test_kinds__of_one_name_are_refused(plugged: list[Kind]) -> None:
    plugged.append(replace(COMPRESSION, name="fetch"))
    with pytest.raises(AssertionError, match="two kinds of operations are named fetch"):
        kinds()
