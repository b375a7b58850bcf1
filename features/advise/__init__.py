"""Advice for a job: the best policy on a machine, the plan that makes it fit, and the
lines to paste."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "advise",
    {
        "commands": {"plan": "command"},
        "services": {
            "adviser": "trace_advice:TraceAdviser",
            "recommendation": "replay_advice",
            "replayed-offload": "trace_advice:with_replayed_offload",
            "trace-layers": "job.trace_layers:with_trace_layers",
        },
    },
)
