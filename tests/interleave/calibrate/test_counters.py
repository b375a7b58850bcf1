"""Counters held against copies that are known, on made-up cards."""

from __future__ import annotations

import time

import pytest

from ebbtide.interleave.calibrate.counters import check, judge
from ebbtide.interleave.calibrate.link import Known
from ebbtide.profiler.sampler.nvml import Gpu, Nvml
from tests.profiler.sampler.fake_nvml import FakeCard, FakeNvml, hopper, older

MS = 1_000_000
# Two seconds at 20 GB/s.
KNOWN = Known(1000 * MS, 3000 * MS, 40 * 10**9)
EVERY = 10 * MS


def samples(scale: float = 1.0, lag_ms: int = 0, lost: int = 0) -> list[tuple[int, int, float]]:
    """Windows of 10 ms from long before the copies to long after; every `lost`-th one sees nothing."""
    found = []
    for number, end in enumerate(range(500 * MS, 4000 * MS, EVERY)):
        begin = end - EVERY
        inside = KNOWN.start_ns <= begin - lag_ms * MS < KNOWN.end_ns
        dropped = lost and number % lost == 0
        found.append((end, EVERY, 20e9 * scale if inside and not dropped else 0.0))
    return found


def test_true_samples_are_judged_so() -> None:
    assert judge(samples(), KNOWN) == {"scale": 1.0, "lag_ms": 5.0, "dropouts": 0.0, "samples": 176}


@pytest.mark.parametrize("scale", [0.9, 1.07])
def test_a_scale_is_found(scale: float) -> None:
    assert judge(samples(scale), KNOWN)["scale"] == pytest.approx(scale)


@pytest.mark.parametrize("lag_ms", [70, 200])
def test_a_lag_is_found_as_finely_as_samples_are(lag_ms: int) -> None:
    found = judge(samples(lag_ms=lag_ms), KNOWN)
    assert found["lag_ms"] == pytest.approx(lag_ms, abs=10)
    assert (found["scale"], found["dropouts"]) == (1.0, 0.0)


def test_samples_that_saw_nothing_are_counted_and_do_not_bend_the_scale() -> None:
    found = judge(samples(lost=4), KNOWN)
    assert found["dropouts"] == pytest.approx(0.25, abs=0.01)
    assert found["scale"] == 1.0


@pytest.mark.parametrize("ends", [[], [900 * MS, 1100 * MS], [3500 * MS]])
def test_without_a_sample_within_the_copies_nothing_is_known(ends: list[int]) -> None:
    found = judge([(end, EVERY, 20e9) for end in ends], KNOWN)
    assert found == {"scale": None, "lag_ms": None, "dropouts": None, "samples": 0}


def test_a_counter_that_never_moves_has_a_scale_of_zero_and_no_lag() -> None:
    found = judge(samples(scale=0.0), KNOWN)
    assert (found["scale"], found["lag_ms"], found["dropouts"]) == (0.0, None, 1.0)


def gpu_of(card: FakeCard) -> Gpu:
    return Nvml(FakeNvml(card)).gpus()[0]


def copying(card: FakeCard) -> object:
    """Copies of 10 GB/s, which the card reports as it does: GPM in MiB/s, the throughput in kB/s."""

    def copy(way: str, seconds: float) -> Known:
        begin = time.monotonic_ns()
        one = {"h2d": (1.0, 0.0), "d2h": (0.0, 1.0)}[way]
        if card.gpm is not None:
            card.gpm = (one[0] * 1e10 / 2**20, one[1] * 1e10 / 2**20)
        card.throughput = (round(one[0] * 1e7), round(one[1] * 1e7))
        time.sleep(seconds)
        end = time.monotonic_ns()
        return Known(begin, end, round(10 * (end - begin)))

    return copy


def test_each_source_of_a_card_is_checked_and_those_that_it_lacks_say_why() -> None:
    card = hopper(throughput_s=0.005)
    found = check(gpu_of(card), copying(card), 0.8)  # type: ignore[arg-type]
    assert list(found) == ["nvml-counters", "gpm", "nvml-throughput"]
    assert found["nvml-counters"] == {"refused": "Not Supported"}
    for source in ("gpm", "nvml-throughput"):
        for way in ("h2d", "d2h"):
            judged = found[source][way]
            assert judged["samples"] >= 2, (source, way, judged)
            assert judged["scale"] == pytest.approx(1.0, rel=0.01)
            assert judged["dropouts"] == 0.0


def test_a_card_without_a_performance_monitor_says_so() -> None:
    card = older()
    found = check(gpu_of(card), copying(card), 0.4)  # type: ignore[arg-type]
    assert found["gpm"] == {"refused": "not on this card"}
    assert found["nvml-throughput"]["h2d"]["scale"] == pytest.approx(1.0, rel=0.01)
