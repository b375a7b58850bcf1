"""Logs of training jobs that several importers read: lines and their clock, settings of
the job, and reports of memory."""
