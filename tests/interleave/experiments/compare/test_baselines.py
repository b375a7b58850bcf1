"""Others on the same job."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ebbtide.interleave.experiments.compare.compare import Asked, compare
from ebbtide.interleave.experiments.compare.results import Comparison
from tests.interleave.experiments.compare.conftest import LINK, TINY
from tests.interleave.experiments.compare.test_compare import MACHINE


def test_torch_begins_where_ours_does_and_goes_the_same_way(found: Comparison) -> None:
    (peer,) = found.peers
    ours = found.results[0].losses
    assert peer.name == "torch"
    assert peer.losses[0] == ours[0]
    assert peer.losses == pytest.approx(ours, abs=0.02)
    assert peer.final_loss == peer.losses[-1]
    assert 0 < max(peer.forward_ms, peer.backward_ms, peer.update_ms) < peer.iteration_ms


@pytest.mark.parametrize("name", ["deepspeed", "torchao"])
def test_those_that_are_missing_are_left_out(name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    asked = Asked(("pipelined",), 3, TINY, link_bytes_per_s=LINK, machine=MACHINE, peers=(name,))
    assert compare(asked).skipped == {name: f"not installed: pip install {name}"}
