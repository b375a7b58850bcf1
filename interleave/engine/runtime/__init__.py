"""Runs a plan: executor, store of the optimizer state, one engine step."""
