"""Tests the spool where writes fail or its size is limited."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import Spool
from tests.profiler.recording.spools.test_recovery import (
    FORWARD,
    SIZE,
    phase,
    recovered,
    step,
)


@pytest.mark.parametrize(("fails", "kept"), [("short", 1), ("full", 0)])
def test_spool__is_given_up_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, kept: int
) -> None:
    write = os.write

    def failing(fd: int, data: bytes) -> int:
        if fails == "full":
            raise OSError(errno.ENOSPC, "no space")
        return write(fd, data[: SIZE + 5])

    path = tmp_path / "agent-here-1.spool"
    spool = Spool(str(path))
    spool.put_header(0, 1, 0)
    spool.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        for fields in step(0):
            spool.put(**fields)
        is_open = [spool.is_open]
        spool.flush()
    assert [*is_open, spool.is_open] == [True, False]
    size = path.stat().st_size
    spool.put(**phase(FORWARD, 4))
    spool.flush()
    spool.close()
    assert path.stat().st_size == size
    data, _ = recovered(tmp_path)
    assert (data.meta["stopped"], len(data.tables["phases"])) == ("cut off", kept)


def test_spool__is_full_once_its_size_is_written(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "s.spool"), max_bytes=2 * SIZE)
    fullness = []
    for _ in range(2):
        spool.put(kinds.PHASE)
        fullness.append(spool.full)
        spool.flush()
        fullness.append(spool.full)
    assert fullness == [False, False, False, True]
    spool.put(kinds.STOPPED)
    spool.close()
    assert (tmp_path / "s.spool").stat().st_size == 3 * SIZE
