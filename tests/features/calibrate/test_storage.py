"""Measurement of storage: real files on a real file system, small and short."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import MachineError
from ebbtide.features.calibrate import storage
from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.features.calibrate.record import MeasurementRecord, Setup

SETUP = Setup(
    Ranks(), threads=1, cores=1, working_set=1 << 20, window_s=0.05, device=None
)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_FILE_BYTES", 32 << 20)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_measure_storage__measures_all_rates_and_leaves_nothing(tmp_path: Path) -> None:
    before, record = open_files(), MeasurementRecord()
    storage.measure_storage(tmp_path, SETUP, record)
    (path,) = record.storage
    assert path.path == str(tmp_path)
    # A drive of today, or the page cache under it.
    assert all(
        1e6 < rate < 1e12 for rate in (path.read_bytes_per_s, path.write_bytes_per_s)
    )
    assert path.duplex_bytes_per_s is not None
    assert path.duplex_bytes_per_s > 1e6
    free = os.statvfs(tmp_path)
    assert path.bytes == pytest.approx(free.f_bavail * free.f_frsize, rel=0.2)
    assert "by O_DIRECT" in record.measured["storage[0]"]["how"] or record.notes
    assert (list(tmp_path.iterdir()), open_files()) == ([], before)


def test_measure_storage__interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before, threads = open_files(), threading.active_count()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        # While blocks are read: files of 32 MB are filled by then, or the interrupt
        # comes while they are.
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            storage.measure_storage(
                tmp_path, Setup(Ranks(), 1, 1, 1 << 20, 10.0, None), MeasurementRecord()
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert (list(tmp_path.iterdir()), open_files(), threading.active_count()) == (
        [],
        before,
        threads,
    )


def test_measure_storage__without_o_direct_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_without_direct(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_without_direct)
    record = MeasurementRecord()
    storage.measure_storage(tmp_path, SETUP, record)
    assert "no O_DIRECT" in record.measured["storage[0]"]["how"]
    assert any("through the page cache" in note for note in record.notes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
def test_measure_storage__says_that_a_tmpfs_is_host_memory() -> None:
    record = MeasurementRecord()
    storage.measure_storage(Path("/dev/shm"), SETUP, record)
    assert any("which is host memory" in note for note in record.notes)


def test_measure_storage__refuses_what_it_cannot_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match="is not a folder"):
        storage.measure_storage(tmp_path / "missing", SETUP, MeasurementRecord())
    monkeypatch.setattr(storage, "_FILE_BYTES", 1)
    with pytest.raises(MachineError, match="too little to measure"):
        storage.measure_storage(tmp_path, SETUP, MeasurementRecord())
    with pytest.raises(MachineError, match="--storage /proc"):
        storage.measure_storage(Path("/proc"), SETUP, MeasurementRecord())
