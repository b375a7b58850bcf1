"""Runs AdamW with its optimizer state where a plan puts it, with the same bits
everywhere."""
