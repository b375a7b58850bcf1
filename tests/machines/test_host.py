"""Tests of hosts in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.machines.host import (
    EXAMPLE,
    Host,
    link_bytes_per_s,
    memory_rate,
    parse_host,
    slower_link,
)

hosts = st.builds(
    Host,
    st.builds(
        "{}-{}-{}ch".format,
        st.sampled_from(["ddr4", "ddr5"]),
        st.integers(1000, 12800),
        st.integers(1, 64),
    )
    | st.builds("lpddr5x-{}gb/s".format, st.integers(10, 99999)),
    st.integers(10**9, 10**15),
    st.integers(1, 4096),
    st.builds("pcie{}x{}".format, st.integers(3, 6), st.sampled_from([1, 2, 4, 8, 16]))
    | st.just("nvlink-c2c"),
    st.integers(1, 16),
    st.integers(1, 1024),
    st.none() | st.builds("{}x{}gbit".format, st.integers(1, 99), st.integers(1, 999)),
)


def test_parse_host__reads_the_example_in_any_order_and_case() -> None:
    host = parse_host(EXAMPLE)
    assert host == Host("ddr5-4800-2ch", 256 * 10**9, 16, "pcie4x16")
    assert parse_host(" 256gb, PCIe4x16 ,16-Core,DDR5-2ch") == host


@given(hosts)
def test_parse_host__reads_its_own_text(host: Host) -> None:
    assert parse_host(host.spec) == host
    assert host.over(Host()) == Host().over(host) == host


REFUSED = [
    *(
        "",
        ",",
        "ddr5",
        "ddr5-0ch",
        "ddr5-2ch-4800",
        "ddr3-2ch",
        "ddr5-99999-2ch",
        "lpddr5x-0GB/s",
        "lpddr5x-2ch",
    ),
    *(
        "0-cores",
        "9999-cores",
        "16cores",
        "pcie4",
        "pcie7x16",
        "pcie4x3",
        "nvlink",
        "16",
        "500MB",
        "1e30",
        "2048-ranks",
        "0x400Gbit",
        "8x400Gb",
    ),
    *(
        "ddr5-2ch,ddr4-2ch",
        "16-cores,8-cores",
        "ddr5-2ch,,16-cores",
        "256GB,512GB",
        "\n",
        "ddr5-２ch",
    ),
]


def test_parse_host__refuses_other_parts_in_one_line_with_an_example() -> None:
    for spec in REFUSED:
        with pytest.raises(MachineError) as error:
            parse_host(spec)
        message = str(error.value)
        assert message.startswith("host ")
        assert message.endswith(f"e.g. {EXAMPLE}")
        assert "\n" not in message
        assert len(message) < 500


def test_rates__are_those_of_the_standards() -> None:
    assert memory_rate("ddr4-3200-8ch") == ("ddr4", 204.8e9)
    assert memory_rate("lpddr5x-512gb/s") == ("lpddr5x", 512e9)
    assert link_bytes_per_s("pcie4x16") == pytest.approx(31.5e9, rel=1e-3)
    assert link_bytes_per_s("pcie5x8") == pytest.approx(31.5e9, rel=1e-3)
    assert link_bytes_per_s("nvlink-c2c") == 450e9


@pytest.mark.parametrize(
    ("gpu", "host", "link"),
    [
        ("pcie4x16", "pcie5x8", "pcie4x8"),
        ("pcie5x16", "pcie4x16", "pcie4x16"),
        ("nvlink-c2c", "pcie5x16", "pcie5x16"),
        ("nvlink-c2c", "nvlink-c2c", "nvlink-c2c"),
    ],
)
def test_slower_link__is_the_smaller_generation_and_width(
    gpu: str, host: str, link: str
) -> None:
    assert slower_link(gpu, host) == link
