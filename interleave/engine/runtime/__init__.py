"""Runs plans: the executor, the store of optimizer state and its operations, and the
engine that does one step."""
