"""Writes traces as files for Perfetto and as tables."""
