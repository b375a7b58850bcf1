"""Replays a trace under other policies: derives the workload, simulates, explains, recommends."""
