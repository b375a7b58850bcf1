"""Runs AdamW with its state wherever a plan says, to the same bits everywhere."""
