"""Marks of the parts of a cycle: `ebbtide.step`."""

import contextlib

from ebbtide.profiler.agent.named_ranges import named_range


def step(name: str) -> contextlib._GeneratorContextManager[None]:
    """Name a part of a cycle in a recorded job or a dry run.

    It is a context manager, or decorates a function. Without a recording it does
    nothing. Marks may be nested; where one mark has all others of a cycle inside, the
    inner ones are the parts.

    Args:
        name: Name of the part, at most 96 bytes: `rollout`, `reward`, `update`.
    """
    return named_range(name)
