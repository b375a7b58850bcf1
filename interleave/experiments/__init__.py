"""Compares policies: trains under each of them, or replays many combinations."""
