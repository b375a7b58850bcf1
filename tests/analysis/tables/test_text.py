"""Tables and lines as text of a given width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.tables.table import Table, ms, size, text
from ebbtide.analysis.tables.text import table_lines

ROWS = [
    {
        "policy": "interleaved:1@0.6,overlap=forward",
        "ms": 4861.6,
        "bytes": 5.5 * 2**30,
        "why": "limited by host memory",
    },
    {
        "policy": "zero-offload",
        "ms": 6100.4,
        "bytes": 0.0,
        "why": "waits 3,812 ms for the CPU",
    },
]
COLUMNS = (
    text("policy", lambda row: row["policy"]),
    ms("iteration", lambda row: row["ms"]),
    text("remark", lambda row: row["why"]),
    size("device memory", lambda row: row["bytes"]),
)


def lines(width: int) -> list[str]:
    return list(table_lines(Table("rows", "Rows", COLUMNS, ROWS), width))


def test_table_lines__prints_headings_in_one_line_where_there_is_space() -> None:
    assert lines(120) == [
        "policy                             iteration ms  remark                      "
        "device memory GiB",
        "interleaved:1@0.6,overlap=forward       4,861.6  limited by host memory      "
        "             5.50",
        "zero-offload                            6,100.4  waits 3,812 ms for the CPU  "
        "             0.00",
    ]


def test_table_lines__wraps_texts_but_no_names_and_units() -> None:
    assert lines(70) == [
        "                                                                device",
        "                                   iteration                    memory",
        "policy                                    ms  remark               GiB",
        "interleaved:1@0.6,overlap=forward    4,861.6  limited by host     5.50",
        "                                              memory",
        "zero-offload                         6,100.4  waits 3,812 ms      0.00",
        "                                              for the CPU",
    ]


def test_table_lines__names_the_columns_that_do_not_fit() -> None:
    assert lines(50) == [
        "policy                             iteration ms",
        "interleaved:1@0.6,overlap=forward       4,861.6",
        "zero-offload                            6,100.4",
        "In a wider terminal also: remark, device memory.",
    ]


@given(st.integers(36, 200))
def test_table_lines__are_no_wider_than_the_terminal(width: int) -> None:
    printed = lines(width)
    assert max(map(len, printed)) <= width
    assert any(line.startswith("interleaved:1@0.6,overlap=forward") for line in printed)
