"""Optimizer state in files, where host memory does not hold it."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "storage",
    {
        "kinds": {"storage": "kinds:KINDS"},
        "lanes": {"storage": "lanes:storage_lanes"},
        "plan-checks": {"storage": "storage_checks:check_storage"},
        "plan-passes": {"storage": "plan_pass:STORAGE_PASS"},
        "services": {"storage": "engine.stored_states:StorageOptions"},
        "rates": {"storage": "rates:STORAGE_RATES"},
    },
)
