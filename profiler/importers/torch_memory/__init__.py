"""Imports memory snapshots and memory timelines of PyTorch."""
