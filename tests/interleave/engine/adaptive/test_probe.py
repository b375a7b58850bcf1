"""The rates that a job starts with."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide import host_limits
from ebbtide.features.storage.engine.stored_states import StorageOptions
from ebbtide.interleave.engine.adaptive import probe as probe_module
from ebbtide.interleave.engine.adaptive.probe import probe
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.machines.machine import Machine


def test_probe__measures_remainders_only_for_jobs_that_have_them() -> None:
    with (
        contextlib.closing(EmulatedDevice()) as device,
        contextlib.closing(CpuKernel(1)) as kernel,
    ):
        assert probe(device, kernel, 1000, None).cpu_remainder_ratio is None
        machine = probe(device, kernel, 1000, None, rule=find_rule("adamw-remainder"))
    assert machine.cpu_remainder_ratio is not None
    assert (
        machine.cpu_update_rate("remainder")
        == (machine.cpu_update_params_per_s or 0) * machine.cpu_remainder_ratio
    )


def test_probe__measures_updates_out_of_place_only_for_jobs_that_speculate() -> None:
    with (
        contextlib.closing(EmulatedDevice()) as device,
        contextlib.closing(CpuKernel(1)) as kernel,
    ):
        assert probe(device, kernel, 1000, None).cpu_out_of_place_share is None
        share = probe(
            device, kernel, 1000, None, out_of_place=True
        ).cpu_out_of_place_share
        assert device.used_bytes == 0
    assert share is not None
    assert 0 < share <= 1


def test_probe__of_a_rank_takes_its_share_of_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DeepSpeed's launcher sets LOCAL_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(host_limits, "available_bytes", lambda: 800e9)
    with (
        contextlib.closing(EmulatedDevice()) as device,
        contextlib.closing(CpuKernel(1)) as kernel,
    ):
        for ranks in (1, 8):
            monkeypatch.setenv("LOCAL_SIZE", str(ranks))
            assert probe(device, kernel, 1000, None).host_memory_bytes == 800e9 / ranks
            machine = StorageOptions(tmp_path, None).added_to(Machine("host"))
            assert machine.host_memory_bytes == pytest.approx(0.8 * 800e9 / ranks)
            free = shutil.disk_usage(tmp_path).free
            assert machine.storage[0].bytes == pytest.approx(free / ranks, rel=0.3)


class SizedKernel(CpuKernel):
    """Updates on the CPU that note how many parameters they have."""

    sizes: set[int]

    def update_ranges(self, grad: torch.Tensor, *state: Any, **options: Any) -> None:
        self.sizes.add(len(grad))
        super().update_ranges(grad, *state, **options)

    def update_beside(self, grad: torch.Tensor, *state: Any, **options: Any) -> None:
        self.sizes.add(len(grad))
        super().update_beside(grad, *state, **options)


@pytest.mark.parametrize(
    ("cache_kib", "memory", "params", "expected"),
    [
        (64, None, 10**6, 4 * 64 * 1024 // 16),
        # An eighth of the memory.
        (64, 8 * 16 * 5000, 10**6, 5000),
        # The job has fewer.
        (64, None, 3000, 3000),
        # At least as many as are copied.
        (1, None, 10**6, 1000),
    ],
)
def test_probe__updates_more_than_the_caches_hold(
    monkeypatch: pytest.MonkeyPatch,
    cache_kib: int,
    memory: int | None,
    params: int,
    expected: int,
) -> None:
    monkeypatch.setattr(probe_module, "_PARAMS", 1000)
    monkeypatch.setattr(host_limits, "cache_bytes", lambda: cache_kib * 1024)
    monkeypatch.setattr(host_limits, "available_bytes", lambda: memory)
    monkeypatch.setattr(host_limits, "local_ranks", lambda: 1)
    with (
        contextlib.closing(EmulatedDevice()) as device,
        contextlib.closing(SizedKernel(1)) as kernel,
    ):
        kernel.sizes = set()
        probe(
            device,
            kernel,
            params,
            None,
            out_of_place=True,
            rule=find_rule("adamw-remainder"),
        )
        assert kernel.sizes == {expected}
        kernel.sizes.clear()
        probe(device, kernel, params, None, host_bytes=8 * 16 * 2000)
        assert kernel.sizes == {max(min(expected, 2000), 1000)}
        assert device.peak_bytes <= 3 * 12 * 1000
