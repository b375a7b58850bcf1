"""Runs AdamW with optimizer state where a plan puts it, with the same bits always."""
