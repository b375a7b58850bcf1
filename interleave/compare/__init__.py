"""Trains one small job under each policy.

It compares the measured schedules with the predicted ones.
"""
