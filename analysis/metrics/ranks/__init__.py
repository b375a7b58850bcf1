"""Compares the ranks of a job: figures of each rank, ranks that differ, a heat map, and
representative ranks."""
