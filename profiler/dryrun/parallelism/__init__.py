"""Runs rank 0 of a job of several ranks, with process groups in which there is nobody else."""
