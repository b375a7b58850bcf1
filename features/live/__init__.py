"""Figures of a recording while it runs: in the terminal, for Prometheus, and for the
job itself."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "live",
    {
        "commands": {"watch": "command"},
        "names": {"metrics": "recording.job_metrics:metrics"},
        "services": {
            "metrics-server": "prometheus.server:serve_metrics",
            "profile-view": "view.profiled:profile_and_show",
        },
    },
)
