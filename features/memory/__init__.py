"""Holders of device memory: at a time, at an error, and what keeps growing; and a limit
of it."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "memory",
    {
        "commands": {"memory": "command"},
        "names": {
            "profiler.MemoryLimitExceeded": "limit:MemoryLimitExceeded",
            "profiler.memory_limit": "limit:memory_limit",
        },
    },
)
