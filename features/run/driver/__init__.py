"""Drives the optimizers of torch in a job's process by engines."""
