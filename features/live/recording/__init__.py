"""Follows a recording while it is written.

It reads what the spools have gained, and keeps the last iterations.
"""
