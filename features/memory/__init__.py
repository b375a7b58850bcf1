"""Holders of device memory, and a limit of it.

Holders are known at a time, at an error, and what keeps growing.
"""

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
