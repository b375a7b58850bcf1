"""Logs of training jobs that several importers read: lines and their clock, settings of
the job, reports of memory."""
