"""Updates beside the next forward and the backward: late updates, and updates before
clipping is known."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "overlap",
    {
        "plan-checks": {"overlap": "overlap_checks:check_overlap"},
        "plan-passes": {"overlap": "plan_pass:OVERLAP_PASS"},
        "step-hooks": {"overlap": "pending_params:pending_params"},
        "services": {
            "beside-step": "plan_pass:beside_step",
            "redone-plan": "speculation:redone",
        },
    },
)
