"""The rates that a job starts with."""

from __future__ import annotations

import contextlib

from ebbtide.interleave.engine.adaptive.probe import probe
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.numerics.kernels import CpuKernel


def test_probe__measures_remainders_only_for_jobs_that_have_them() -> None:
    with contextlib.closing(EmulatedDevice()) as device, contextlib.closing(CpuKernel(1)) as kernel:
        assert probe(device, kernel, 1000, None).cpu_remainder_ratio is None
        machine = probe(device, kernel, 1000, None, remainder=True)
    assert machine.cpu_remainder_ratio is not None
    assert machine.cpu_update_rate("remainder") == (machine.cpu_update_params_per_s or 0) * machine.cpu_remainder_ratio


def test_probe__measures_updates_out_of_place_only_for_jobs_that_speculate() -> None:
    with contextlib.closing(EmulatedDevice()) as device, contextlib.closing(CpuKernel(1)) as kernel:
        assert probe(device, kernel, 1000, None).cpu_out_of_place_share is None
        share = probe(device, kernel, 1000, None, out_of_place=True).cpu_out_of_place_share
        assert device.used_bytes == 0
    assert share is not None
    assert 0 < share <= 1
