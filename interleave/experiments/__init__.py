"""Compares policies: by training under each of them, or by replaying many combinations."""
