"""The request for a slice: a text that anybody may have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.profiler.agent.options import (
    MAX_ITERATIONS,
    REQUEST,
    SliceRequest,
    parse_request,
    read_request,
)

REQUESTS = st.builds(
    lambda number, first, count, poll_us, allocator, transfers: SliceRequest(
        number, first, first + count, poll_us, min(allocator, count), transfers
    ),
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**31),
    st.integers(1, MAX_ITERATIONS),
    st.integers(0, 60_000_000),
    st.integers(0, MAX_ITERATIONS),
    st.booleans(),
)
_NUMBERS = st.integers(-(2**70), 2**70)
_NEAR = st.builds(
    "ebbtide-slice-1 {} iterations {}:{} poll {} allocator {} transfers {}".format,
    *(_NUMBERS | st.integers(0, 3) for _ in range(6)),
)
VALID = SliceRequest(123456789, 120, 140, 25_000, 3, True).text()


@given(REQUESTS)
def test_request__is_read_as_it_was_written(request: SliceRequest) -> None:
    assert parse_request(request.text()) == request


@given(st.text() | _NEAR)
def test_parse_request__takes_any_text(text: str) -> None:
    request = parse_request(text)
    assert request is None or (
        request.text() == text and 0 < request.end - request.first <= MAX_ITERATIONS
    )


OUT_OF_BOUNDS = [
    ("120:140", "140:140"),
    ("120:140", "140:120"),
    ("120:140", "-1:140"),
    ("120:140", f"0:{MAX_ITERATIONS + 1}"),
    ("120:140", "4294967290:4294967296"),
    ("123456789", "0"),
    ("123456789", "9223372036854775808"),
    ("poll 25000", "poll 60000001"),
    ("poll 25000", "poll 2.5"),
    ("allocator 3", "allocator 21"),
    ("transfers 1", "transfers 2"),
    ("transfers 1", "transfers 1\n"),
    ("slice-1", "slice-2"),
    ("120", "١٢٠"),
]


def test_parse_request__rejects_what_is_out_of_bounds() -> None:
    for part, wrong in OUT_OF_BOUNDS:
        assert parse_request(VALID) is not None
        assert parse_request(VALID.replace(part, wrong, 1)) is None


def test_read_request__takes_only_a_link_of_its_own_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = str(tmp_path), tmp_path / REQUEST
    assert read_request(folder) is None
    os.mkfifo(link)  # to open it would block
    assert read_request(folder) is None
    link.unlink()
    link.write_text(VALID)
    assert read_request(folder) is None
    link.unlink()
    link.symlink_to(VALID)
    assert read_request(folder) == parse_request(VALID)
    if os.geteuid() == 0:
        os.lchown(link, 12345, 12345)
        assert read_request(folder) is None
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert read_request(folder) == parse_request(VALID)
