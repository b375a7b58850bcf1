"""Rules: one file for each kind of record."""
