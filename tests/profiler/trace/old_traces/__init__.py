"""Traces of earlier versions, and the script that makes those of the current one."""
