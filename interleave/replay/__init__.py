"""Replays a job under other policies: its workload from a trace, the results, the gain of each mechanism, advice."""
