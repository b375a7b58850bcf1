"""Follows a recording while it is written: reads what the spools have gained, and keeps
the last iterations."""
