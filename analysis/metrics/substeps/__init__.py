"""Computes the sub-steps of an update from a trace's operations."""
