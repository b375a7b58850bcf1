"""PlanRun: the order in which operations are repeated."""

from __future__ import annotations

from typing import Any

from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.model.plan import STEP, Op, Plan, Resource


def op(kind: str, resource: Resource, subgroup: int, *after: int) -> Op:
    return Op(kind, resource, subgroup, 1, 0.0, 0.0, after)  # type: ignore[arg-type]


def test_repeat__lets_operations_run_again_in_the_order_in_which_others_wait_for_them() -> (
    None
):
    ops = (
        op("update", "cpu", 1),
        op("update", "cpu", 0),
        op("clip", "cpu", -1),
        op("upload", "h2d", 0, 1, 2),
        op("upload", "h2d", 1, 0, 2),
    )
    run = PlanRun(
        Plan("test", ops, 2, frozenset(), frozenset(), frozenset(), 0.0), {2: -1}
    )
    run.advance_to(STEP, lambda: None)  # type: ignore[arg-type, return-value]

    def take() -> int | None:
        return run.take("cpu", lambda _: True)

    assert (take(), take(), take()) == (0, 1, None)
    run.complete(0, 1.0, 2.0)
    # One has ended, the other one still runs.
    run.repeat([0, 1])
    run.complete(1, 2.0, 3.0)
    assert (take(), take(), take()) == (1, 0, None)
    assert [index for index, _, _ in run.discarded] == [0, 1]
    assert run.remaining == len(ops)


def test_repeat__of_a_copy_holds_back_what_waits_for_it() -> None:
    ops = (
        op("gradient down", "d2h", 0),
        op("update", "cpu", 0, 0),
        op("upload", "h2d", 0, 1),
    )
    run = PlanRun(Plan("test", ops, 1, frozenset(), frozenset(), frozenset(), 0.0), {})
    mark: Any = object()
    run.advance_to(STEP, lambda: mark)

    def take(lane: Resource) -> int | None:
        return run.take(lane, lambda _: True)

    def copy() -> None:
        assert take("d2h") == 0
        run.issue(0, mark)
        run.complete(0, 1.0, 2.0)

    copy()
    run.add_mark(0, mark)
    run.repeat([0])
    # The update could start before.
    assert take("cpu") is None
    assert not run.can_take("cpu", lambda _: True)
    assert mark in run.marks_before(0)
    copy()
    assert take("cpu") == 1
    assert take("cpu") is None
