"""Compares two runs, and holds the second one to limits."""

from ebbtide.analysis.diff.comparison import Change, Diff, SettingChange, TimeChange, compare

__all__ = ["Change", "Diff", "SettingChange", "TimeChange", "compare"]
