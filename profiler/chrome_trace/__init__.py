"""Reads the events of Chrome traces (JSON files of any length) in constant memory."""
