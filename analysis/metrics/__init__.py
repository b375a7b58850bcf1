"""Computes the figures of a trace.

They are phases, memory, free-memory windows, link throughput and sub-steps.
"""
