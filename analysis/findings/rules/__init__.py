"""The rules, by theme."""
