"""Simulates plans, and computes lower bounds."""
