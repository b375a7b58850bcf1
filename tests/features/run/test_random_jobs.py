"""Random jobs train under every policy as they do under torch."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.conftest import FUZZ
from tests.features.run.conftest import Drive
from tests.features.run.random_jobs import Outcome, RandomJob

SEEDS = 60
MORE_SEEDS = 1_000
POLICIES = (
    *("twin-flow:0.3", "twin-flow:0.7", "pipelined", "interleaved:2", "adaptive"),
    *("adaptive,overlap=none", "interleaved:2,overlap=both"),
    *("pipelined,overlap=forward", "adaptive,overlap=forward"),
)
# Events whose state dicts are not torch's to the letter: a fused step that a scaler
# has skipped makes empty state, and a type that changes in the middle stays with it.
UNLIKE_LAYOUTS = {"overflow", "type"}
# A value of this size, relative to the parameter, is no difference.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-4}


def check_job(seed: int, drive: Drive) -> None:
    """Run the job of a seed under torch, and under two policies."""
    random = Random(f"policy {seed}")
    other = random.choice(POLICIES)
    bare = RandomJob(seed).run()
    kernels = RandomJob(seed, other_kernels=True).run()
    drive("zero-offload", compares=True)
    offloaded = RandomJob(seed).run()
    drive(other, compares=True)
    driven = RandomJob(seed).run()
    drive("none")
    case = f"seed {seed}, {other}: {bare.events}"
    try:
        assert driven.error is offloaded.error, "errors"
        # Torch cannot do all steps that an engine can, and checks in another order.
        fails = bare.error is not None and "type" in str(bare.events)
        assert fails or offloaded.error in (None, bare.error), "errors"
        assert_equal_bits(offloaded, driven)
        if bare.error is None:
            if UNLIKE_LAYOUTS.isdisjoint(" ".join(bare.events).split()):
                assert_same_layouts(offloaded, bare)
            assert_close(offloaded, bare, kernels)
    except AssertionError as error:
        error.add_note(case)
        for one in (bare.exception, offloaded.exception, driven.exception):
            error.add_note(repr(one))
        raise


def assert_equal_bits(one: Outcome, other: Outcome) -> None:
    for kind in ("params", "states"):
        pairs = zip(getattr(one, kind), getattr(other, kind), strict=True)
        for number, (a, b) in enumerate(pairs):
            message = f"{kind} {number} of {tuple(a.shape)}: {distance(a, b)}"
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), message
    assert repr(one.losses) == repr(other.losses)


def assert_same_layouts(one: Outcome, bare: Outcome) -> None:
    for own, expected in zip(one.layouts, bare.layouts, strict=True):
        for part, expected_part in zip(own, expected, strict=True):
            assert part == expected_part, f"{part} is not {expected_part}"


def assert_close(one: Outcome, bare: Outcome, kernels: Outcome) -> None:
    """Assert that parameters differ as far as those of torch's kernels, or little."""
    assert len(one.losses) == len(bare.losses)
    pairs = list(zip(bare.params, kernels.params, strict=True))
    allowed = 3 * max(distance(b, c) for b, c in pairs)
    has_bf16 = any(param.dtype == torch.bfloat16 for param in bare.params)
    for number, (a, (b, c)) in enumerate(zip(one.params, pairs, strict=True)):
        least = TOLERANCES[torch.bfloat16 if has_bf16 else a.dtype]
        # Torch's kernels do not agree on those of 0 times infinity.
        patterns = [b.isnan().tolist(), c.isnan().tolist()]
        assert a.isnan().tolist() in patterns, f"parameter {number}: NaN"
        assert distance(a, b) <= max(least, allowed), (
            f"parameter {number}: {distance(a, b)}, not {allowed}"
        )


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-2))


def test_random_jobs_train_as_under_torch(drive: Drive) -> None:
    for seed in range(SEEDS):
        check_job(seed, drive)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_more_random_jobs_train_as_under_torch(drive: Drive, part: int) -> None:
    first = SEEDS if FUZZ <= 1 else Random().randrange(10**6)
    for number in range(MORE_SEEDS // 10):
        check_job(first + part * MORE_SEEDS + number, drive)
