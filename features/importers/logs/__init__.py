"""Logs of training jobs that several importers read.

They have lines and their clock, settings of the job, and reports of memory.
"""
