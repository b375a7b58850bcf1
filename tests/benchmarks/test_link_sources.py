"""The comparison of the link's sources with known copies, through the real pynvml over
mocked cards."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.gpu.steps.link_counters import (
    ReferenceCopies,
    check_counters,
    check_sources,
)
from ebbtide.profiler.agent.spool import LINK_SOURCES
from ebbtide.profiler.sampler.nvml import NvmlError
from tests.nvml_mock.cards import (
    A100,
    FORBIDDEN,
    GB200,
    GH200,
    GPM_ONLY,
    H100,
    MIG,
    RTX_4090,
    WRAPPING,
    MockCard,
)
from tests.nvml_mock.conftest import OpenMock, drivers, open_mock

__all__ = ["drivers", "open_mock"]


@pytest.mark.parametrize(
    ("card", "uuid", "reason"),
    [
        (GB200, GB200.uuid, "NVLink-C2C"),
        (GH200, GH200.uuid, "NVLink-C2C"),
        (MIG, MIG.mig_devices[1].uuid, "MIG device"),
        # CUDA may give the UUID of the card.
        (MIG, MIG.uuid, "MIG device"),
        (replace(H100, lost_ns=0), H100.uuid, "NVML does not show GPU-"),
    ],
)
def test_check_counters__does_not_compare_copies_with_other_traffic(
    open_mock: OpenMock,
    monkeypatch: pytest.MonkeyPatch,
    card: MockCard,
    uuid: str,
    reason: str,
) -> None:
    properties = SimpleNamespace(uuid=uuid.partition("-")[2])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    open_mock(card)
    with pytest.raises(NvmlError, match=re.escape(reason)):
        check_counters(0, seconds=1.0)


REFUSED = {
    A100: {"nvml-counters": "Not Supported", "gpm": "not on this card"},
    H100: {},
    GPM_ONLY: {"nvml-counters": "Not Supported", "nvml-throughput": "Not Supported"},
    RTX_4090: {"gpm": "not on this card"},
    WRAPPING: {"gpm": "not on this card"},
    FORBIDDEN: {
        "nvml-counters": "Insufficient Permissions",
        "gpm": "not on this card",
        "nvml-throughput": "Insufficient Permissions",
    },
}


@pytest.mark.parametrize(
    "card",
    [
        H100,
        FORBIDDEN,
        *(
            pytest.param(card, marks=pytest.mark.slow)
            for card in (A100, GPM_ONLY, RTX_4090, WRAPPING)
        ),
    ],
    ids=lambda card: card.name,
)
def test_check_sources__compares_each_source_with_the_bytes_of_copies(
    open_mock: OpenMock, monkeypatch: pytest.MonkeyPatch, card: MockCard
) -> None:
    """The mock moves bytes all the time, at the rates of its card: those are the
    copies."""
    monkeypatch.setattr("benchmarks.gpu.steps.link_counters._PAUSE_S", 0.02)
    (gpu,), _ = open_mock(card)

    def copy(direction: str, seconds: float) -> ReferenceCopies:
        start_ns = time.monotonic_ns()
        time.sleep(seconds)
        end_ns = time.monotonic_ns()
        return ReferenceCopies(
            start_ns, end_ns, round(card.bytes_between(direction, start_ns, end_ns))
        )

    results = check_sources(gpu, copy, seconds=0.6)
    assert list(results) == list(LINK_SOURCES)
    assert {
        name: result["refused"]
        for name, result in results.items()
        if "refused" in result
    } == REFUSED[card]
    for result in results.values():
        for comparison in () if "refused" in result else (result["h2d"], result["d2h"]):
            assert comparison["samples"] >= 2
            assert comparison["scale"] == pytest.approx(1.0, rel=0.02)
            assert comparison["dropouts"] == 0.0
