"""Fits the rates of a machine to traces of jobs that ran on it."""
