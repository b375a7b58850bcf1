"""Reads Chrome trace events from JSON files of any length, in constant memory."""
