"""Replays many workloads on many machines under many policies, at many sizes."""

from ebbtide.seams import Feature

FEATURE = Feature("sweep", {"commands": {"sweep": "command"}})
