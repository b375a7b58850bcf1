"""`ebbtide machines`."""

from __future__ import annotations

import json
import re

import pytest

from ebbtide.machines.catalog import preset, presets
from tests.conftest import ebbtide_in_process


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_machines__lists_all_by_name_within_80_columns() -> None:
    result = ebbtide_in_process("machines")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[3 : 3 + len(presets())]] == presets()
    assert re.search(r"h100-80gb-sxm-published .* fit \d\.\d %\n", result.stdout)


def test_machines__tells_machines_of_one_card_apart() -> None:
    result = ebbtide_in_process("machines", "h100-80gb")
    assert "h100-80gb-sxm-published: logs and NVML monitor files" in result.stdout
    assert "nothing was measured" in result.stdout.replace("\n", " ")
    twins = [
        preset(name).for_ranks(4) for name in ("h100-80gb", "h100-80gb-sxm-published")
    ]
    one, other = (machine.host_memory_bytes_per_s for machine in twins)
    assert one
    assert other
    text = " ".join(result.stdout.split())
    assert (
        "h100-80gb-sxm-published is the same card as h100-80gb: host "
        f"{other / one:.2f}x" in text
    )
    assert (
        "is fitted to measured runs (4 ranks on a host), h100-80gb from data sheets (8 "
        "ranks on a host)." in text
    )
    assert "h100-80gb-pcie is the same card" not in text
    assert (
        "host: ddr5-4800-16ch,112-cores,2-sockets,pcie5x16,2048GiB,8-ranks"
        in result.stdout
    )
    assert "rtx" not in result.stdout


def test_machines__prints_json() -> None:
    machines = json.loads(ebbtide_in_process("machines", "--json").stdout)["machines"]
    assert [machine["name"] for machine in machines] == presets()
    kinds = {machine["name"]: machine["kind"] for machine in machines}
    assert kinds["h100-80gb"] == "data sheet"
    assert kinds["a100-40gb-published"] == "fitted"
    assert all(
        machine["source"] and machine["file"]["h2d_bytes_per_s"] for machine in machines
    )


def test_machines__names_what_is_meant() -> None:
    result = ebbtide_in_process("machines", "h10")
    assert result.returncode == 0
    result = ebbtide_in_process("machines", "k80")
    assert result.returncode == 2
    assert result.stderr.startswith(
        "ebbtide: there is no machine 'k80': write the name of one that `ebbtide "
    )


def test_machines__takes_names_as_people_write_them_and_tells_prices() -> None:
    result = ebbtide_in_process("machines", "RTX 4090")
    assert "price: $1,599 at the launch" in " ".join(result.stdout.split())
    assert "rtx4090-laptop" not in result.stdout
    laptop = ebbtide_in_process("machines", "rtx4090-laptop").stdout
    assert "price:" not in laptop
