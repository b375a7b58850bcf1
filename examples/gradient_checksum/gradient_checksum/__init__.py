"""Checksums of the gradients in host memory: a kind of operation with a lane of its
own, and a policy with it."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "gradient-checksum",
    {
        "kinds": {"gradient-checksum": "kinds:KINDS"},
        "lanes": {"gradient-checksum": "kinds:lanes"},
        "policies": {"gradient-checksum": "policy"},
    },
)
