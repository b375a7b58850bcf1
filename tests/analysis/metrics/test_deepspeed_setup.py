"""Rounding of Twin-Flow's ratio to whole subgroups."""

from ebbtide.analysis.metrics.deepspeed_setup import resident_subgroups, version_numbers

ROUNDINGS = [
    (1.0, 5, 0, 0),
    (0.0, 5, 5, 5),
    (0.5, 5, 2, 3),
    (0.3, 10, 7, 7),
    (0.9, 10, 0, 1),
    (0.5, 1, 0, 1),
    (0.5, 31, 15, 16),
    (0.8, 31, 6, 7),
]


def test_resident_subgroups__rounds_as_deepspeed_does() -> None:
    """(1 - 0.9) * 10 is just less than 1; the published logs are of 0.13.3 with 31 subgroups."""
    for ratio, count, resident, resident_before_0_18 in ROUNDINGS:
        for version in (None, "0.18.0", "0.19.8", "1.0", "unknown"):
            assert resident_subgroups(ratio, count, version) == resident
        for version in ("0.12.3", "0.13.3+895a05c1", "0.17.6"):
            assert resident_subgroups(ratio, count, version) == resident_before_0_18


VERSIONS = [
    (None, ()),
    ("", ()),
    ("unknown", ()),
    ("0.13.3+895a05c1", (0, 13, 3)),
    ("0.19", (0, 19)),
    ("1.2.dev0", (1, 2)),
]


def test_version_numbers__reads_the_leading_numbers() -> None:
    for version, numbers in VERSIONS:
        assert version_numbers(version) == numbers
