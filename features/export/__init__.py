"""Writes traces as files for Perfetto and as tables."""

from ebbtide.seams import Feature

FEATURE = Feature("export", {"commands": {"export": "command"}})
