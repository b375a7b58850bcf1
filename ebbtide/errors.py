"""What goes wrong with input that a user gave."""


class UserError(Exception):
    """Bad input: the message is one line that says what is wrong and what to do. Commands exit with 2."""


class TraceError(UserError):
    """A trace that cannot be read, or not be written where it was asked for."""
