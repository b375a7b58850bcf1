"""Compares two runs, and holds the second one to limits."""

from ebbtide.seams import Feature

FEATURE = Feature("diff", {"commands": {"diff": "command"}})
