"""Keeps the figures of the last iterations for the job."""
