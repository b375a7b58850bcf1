"""Computes the figures of a trace: phases, memory, free-memory windows, link throughput
and sub-steps."""
