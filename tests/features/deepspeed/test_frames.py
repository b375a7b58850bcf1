"""Frames of DeepSpeed in the stacks of allocations."""

from ebbtide.analysis.metrics.holders.categories import FORWARD, STEP, part_of_step

ZERO = "/env/site-packages/deepspeed/runtime/zero"


def test_part_of_step__counts_allocations_of_zero_as_those_of_an_optimizer() -> None:
    assert (
        part_of_step(
            f"_create_fp32_partitions ({ZERO}/stage3.py:9)\nmain (/home/me/train.py:3)"
        )
        == STEP
    )
    assert (
        part_of_step(
            f"forward ({ZERO.replace('zero', 'pipe')}/module.py:9)\nmain "
            "(/home/me/train.py:3)"
        )
        == FORWARD
    )
