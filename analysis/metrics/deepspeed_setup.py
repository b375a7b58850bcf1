"""The rounding of DeepSpeed's partial offload (Twin-Flow) to whole subgroups, which policies follow."""

import re


def resident_subgroups(ratio: float, subgroups: int, version: str | None = None) -> int:
    """Return how many subgroups Twin-Flow keeps on the GPU, state and update, as DeepSpeed rounds them. `ratio` is the
    share of the parameters to update on the CPU, `version` as in `0.13.3+c7da512a`; None: a current one.

    From 0.18 on, subgroup i is resident where i < int((1 - ratio) * subgroups): the first ones. Up to 0.17, subgroup i
    is on the CPU where i < int(ratio * subgroups): the last ones are resident (runtime/zero/stage3.py of each). The
    products are floating point as in DeepSpeed: (1 - 0.9) * 10 is just less than 1, so none is resident."""
    return subgroups - int(ratio * subgroups) if residents_are_last(version) else int((1 - ratio) * subgroups)


def resident_range(ratio: float, subgroups: int, version: str | None = None) -> range:
    """Return the numbers of the subgroups that Twin-Flow keeps on the GPU (see `resident_subgroups`)."""
    count = resident_subgroups(ratio, subgroups, version)
    return range(subgroups - count, subgroups) if residents_are_last(version) else range(count)


def version_numbers(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a version to compare: (0, 13, 3) for `0.13.3+c7da512a`; empty where it is not known."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def residents_are_last(version: str | None) -> bool:
    """Return whether the version rounds down the subgroups on the CPU instead of those on the GPU. Its resident
    subgroups are then the last ones instead of the first."""
    numbers = version_numbers(version)
    return bool(numbers) and numbers < (0, 18)
