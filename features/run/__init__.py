"""Runs an unmodified job under an offload policy: torch's optimizers are driven."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "run",
    {
        "commands": {"run": "command"},
        "services": {"job-comparison": "comparison.command"},
    },
)
