"""Gates of one method by two optimizers."""

from __future__ import annotations

import pytest

from ebbtide.features.overlap.gates import MethodGate


class Group:
    """An object with a method."""

    def gather(self, values: list[str], *, times: int = 1) -> list[str]:
        return values * times


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_remove__leaves_other_gates_in_any_order(order: tuple[int, int]) -> None:
    group, calls = Group(), []
    gates = [
        MethodGate(
            group,
            "gather",
            lambda values, name=name, **_: calls.append((name, *values)),
        )
        for name in "ab"
    ]
    assert group.gather(["x"], times=2) == ["x", "x"]
    assert calls == [("b", "x"), ("a", "x")]
    gates[order[0]].remove()
    group.gather(["y"])
    assert calls[2:] == [("ab"[order[1]], "y")]
    gates[order[1]].remove()
    assert group.gather(["z"]) == ["z"]
    assert len(calls) == 3


def test_gate__raises_before_the_method_is_called() -> None:
    group = Group()

    def fail(values: list[str]) -> None:
        raise ValueError("late")

    gate = MethodGate(group, "gather", fail)
    values = ["x"]
    with pytest.raises(ValueError, match="late"):
        group.gather(values)
    gate.remove()
    assert "gather" not in vars(group)
