"""Checks by theme; each file is found by itself."""
