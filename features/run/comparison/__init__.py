"""Runs a job under several policies, and compares results with predictions."""
