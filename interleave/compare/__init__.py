"""Trains one small job under each policy, and compares the measured schedules with the
predicted ones."""
