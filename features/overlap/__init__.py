"""Updates beside the next forward and the backward: late updates, and those before clipping is known."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "overlap",
    {
        "plan-checks": {"overlap": "overlap_checks:check_overlap"},
        "services": {"redone-plan": "speculation:redone"},
    },
)
