"""Errors raised while a plan runs."""

from ebbtide.errors import UserError


class EngineError(UserError):
    """The optimizer cannot continue, or does not support what was requested."""


class DeviceMemoryError(EngineError):
    """The device has too little free memory for what a plan puts there."""


class UpdateNotStarted(EngineError):
    """An update could not start: it has changed nothing."""
