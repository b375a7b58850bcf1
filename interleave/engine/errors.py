"""What can go wrong while a plan runs."""

from __future__ import annotations

from ebbtide.errors import UserError


class EngineError(UserError):
    """The optimizer cannot go on, or cannot do what it is asked."""


class DeviceMemoryError(EngineError):
    """The device has no room for what a plan puts there."""
