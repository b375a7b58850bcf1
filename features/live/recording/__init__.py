"""Follows a recording while it is written: reads what its spools have gained, and keeps
the last iterations."""
