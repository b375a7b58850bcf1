"""Traces from what other tools recorded: a file per format, recognised by what it holds."""
