"""Tests figures of a published run, imported: an interleaved update on an H100."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis.plot import draw
from ebbtide.profiler.trace import Trace, open_trace
from tests.analysis.plot.pictures import outside, overlapping
from tests.conftest import slow

GIB = 2**30
RUN = Path(__file__).parents[3] / "traces" / "h100-20b-interleaved-2.ebb"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_trace(RUN)


@pytest.mark.parametrize(
    "kind", slow(["both", "memory", "link", "windows"], but=["both"])
)
def test_draw__has_no_overlapping_texts(trace: Trace, kind: str) -> None:
    figure = draw([trace, trace], kind=kind)
    assert overlapping(figure) == []
    assert outside(figure) == []
