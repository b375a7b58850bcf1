"""Advice for a job: the best policy, the change that makes it fit, and the lines."""

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
