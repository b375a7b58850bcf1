"""Replays of a job under policies: its workload, the results, and their pictures."""
