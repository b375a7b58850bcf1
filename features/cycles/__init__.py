"""Cycles: what a job repeats around its iterations, such as a rollout and the updates
that follow it.
"""

from ebbtide.seams import Feature

FEATURE = Feature(
    "cycles",
    {
        "commands": {"cycles": "command"},
        "findings": {"cycles": "findings"},
        "leads": {"cycles": "tables:lead"},
        "names": {"step": "marks:step"},
        "services": {"cycle": "cycles:cycle_figures", "repeats": "tables:repeats"},
    },
)
