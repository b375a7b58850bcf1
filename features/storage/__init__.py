"""Optimizer state in files, where host memory does not hold it."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "storage",
    {
        "kinds": {"storage": "kinds:KINDS"},
        "policies": {"storage": "policy"},
    },
)
