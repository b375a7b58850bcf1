"""Errors and signals of dry runs."""

from ebbtide.errors import UserError


class DryRunError(UserError):
    """A job that cannot be dry-run: what it uses, and what to do."""


class CannotFakeError(RuntimeError):
    """An operation of the job that cannot be faked; the message names it and says what
    to do."""


class DryRunFinished(BaseException):
    """Raised in the job when its iterations are done, or, with the line on it, where it
    cannot get so far. Not an `Exception`, which the job might catch."""
