"""Runs AdamW with its state where a plan puts it, with the same bits everywhere."""
