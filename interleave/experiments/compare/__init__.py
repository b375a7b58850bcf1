"""Trains one small job under each policy for real, and holds what was measured against what was predicted."""
