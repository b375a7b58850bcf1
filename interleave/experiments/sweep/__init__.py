"""Replays many workloads on many machines under many policies, at many sizes."""
