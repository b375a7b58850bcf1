"""The cards of a host through the real pynvml, over the mock of NVML."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.doctor.check import examine
from ebbtide.features.doctor.host import this_host
from tests.nvml_mock.cards import GB200, H100, RTX_4090
from tests.nvml_mock.conftest import OpenMock, drivers, open_mock

__all__ = ["drivers", "open_mock"]


def test_this_host__has_the_cards_of_the_job_in_its_order(
    open_mock: OpenMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_mock(H100, RTX_4090, GB200)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host = this_host()
    assert [card.device["name"] for card in host.cards] == [
        H100.name,
        RTX_4090.name,
        GB200.name,
    ]
    assert host.ranks == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"1,{H100.uuid},7,2")
    assert [card.device["name"] for card in this_host().cards] == [
        RTX_4090.name,
        H100.name,
    ]


def test_link__names_the_lanes_of_each_card(
    open_mock: OpenMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_mock(H100, RTX_4090, GB200)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    links = [
        (one.state, one.detail)
        for one in examine(this_host(["python", "x.py"]))
        if one.name == "link"
    ]
    assert [state for state, _ in links] == ["ok", "warning", "ok"]
    assert "PCIe 5 x16" in links[0][1]
    assert "8 of 16 lanes" in links[1][1]
    assert "NVLink-C2C" in links[2][1]


def test_this_host__says_why_it_sees_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = this_host()
    if host.cards:
        pytest.skip("there is a GPU here")
    assert "NVML" in host.missing_cards
