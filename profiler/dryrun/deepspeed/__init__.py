"""Runs DeepSpeed in a dry run: its own code, with stand-ins for what it compiles."""
