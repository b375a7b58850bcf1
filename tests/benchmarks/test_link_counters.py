"""Comparison of link counters with copies of an exact size, on fake cards."""

from __future__ import annotations

import time

import pytest

from benchmarks.gpu.steps.link_counters import (
    RateSample,
    ReferenceCopies,
    check_sources,
    compare_samples,
)
from ebbtide.profiler.sampler.gpu import Gpu, open_gpus
from ebbtide.profiler.sampler.nvml import Nvml
from tests.profiler.sampler.fake_nvml import FakeCard, FakeNvml, hopper, older

MS = 1_000_000
# Two seconds at 20 GB/s.
COPIES = ReferenceCopies(1000 * MS, 3000 * MS, 40 * 10**9)
WINDOW = 10 * MS


def samples(scale: float = 1.0, lag_ms: int = 0, lost: int = 0) -> list[RateSample]:
    """Windows of 10 ms from long before the copies to long after; every `lost`-th one
    shows no traffic."""
    windows = []
    for number, end in enumerate(range(500 * MS, 4000 * MS, WINDOW)):
        begin = end - WINDOW
        inside = COPIES.start_ns <= begin - lag_ms * MS < COPIES.end_ns
        dropped = lost and number % lost == 0
        windows.append(
            RateSample(end, WINDOW, 20e9 * scale if inside and not dropped else 0.0)
        )
    return windows


def test_compare_samples__exact_samples() -> None:
    assert compare_samples(samples(), COPIES) == {
        "scale": 1.0,
        "lag_ms": 5.0,
        "dropouts": 0.0,
        "samples": 176,
    }


@pytest.mark.parametrize("scale", [0.9, 1.07])
def test_compare_samples__finds_the_scale(scale: float) -> None:
    assert compare_samples(samples(scale), COPIES)["scale"] == pytest.approx(scale)


@pytest.mark.parametrize("lag_ms", [70, 200])
def test_compare_samples__finds_the_lag_within_one_window(lag_ms: int) -> None:
    result = compare_samples(samples(lag_ms=lag_ms), COPIES)
    assert result["lag_ms"] == pytest.approx(lag_ms, abs=10)
    assert (result["scale"], result["dropouts"]) == (1.0, 0.0)


def test_compare_samples__counts_dropouts_and_leaves_them_out_of_the_scale() -> None:
    result = compare_samples(samples(lost=4), COPIES)
    assert result["dropouts"] == pytest.approx(0.25, abs=0.01)
    assert result["scale"] == 1.0


@pytest.mark.parametrize("ends", [[], [900 * MS, 1100 * MS], [3500 * MS]])
def test_compare_samples__no_sample_within_the_copies(ends: list[int]) -> None:
    result = compare_samples([RateSample(end, WINDOW, 20e9) for end in ends], COPIES)
    assert result == {"scale": None, "lag_ms": None, "dropouts": None, "samples": 0}


def test_compare_samples__a_constant_counter_has_scale_zero_and_no_lag() -> None:
    result = compare_samples(samples(scale=0.0), COPIES)
    assert (result["scale"], result["lag_ms"], result["dropouts"]) == (0.0, None, 1.0)


def gpu_of(card: FakeCard) -> Gpu:
    return open_gpus(Nvml(FakeNvml(card))).gpus[0]


def copying(card: FakeCard) -> object:
    """Make a function that copies at 10 GB/s. The card reports them in its units: GPM
    in MiB/s, throughput in kB/s."""

    def copy(direction: str, seconds: float) -> ReferenceCopies:
        begin = time.monotonic_ns()
        h2d, d2h = {"h2d": (1.0, 0.0), "d2h": (0.0, 1.0)}[direction]
        if card.gpm is not None:
            card.gpm = (h2d * 1e10 / 2**20, d2h * 1e10 / 2**20)
        card.throughput = (round(h2d * 1e7), round(d2h * 1e7))
        time.sleep(seconds)
        end = time.monotonic_ns()
        return ReferenceCopies(begin, end, round(10 * (end - begin)))

    return copy


def test_check_sources__checks_each_source_and_says_why_others_are_missing() -> None:
    card = hopper(throughput_s=0.005)
    result = check_sources(gpu_of(card), copying(card), 0.8)  # type: ignore[arg-type]
    assert list(result) == ["nvml-counters", "gpm", "nvml-throughput"]
    assert result["nvml-counters"] == {"refused": "Not Supported"}
    for source in ("gpm", "nvml-throughput"):
        for direction in ("h2d", "d2h"):
            comparison = result[source][direction]
            assert comparison["samples"] >= 2, (source, direction, comparison)
            assert comparison["scale"] == pytest.approx(1.0, rel=0.01)
            assert comparison["dropouts"] == 0.0


def test_check_sources__a_card_without_performance_monitor() -> None:
    card = older()
    result = check_sources(gpu_of(card), copying(card), 0.4)  # type: ignore[arg-type]
    assert result["gpm"] == {"refused": "not on this card"}
    assert result["nvml-throughput"]["h2d"]["scale"] == pytest.approx(1.0, rel=0.01)
