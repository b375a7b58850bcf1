"""Fails a test whose code uses more device memory than a limit, and lists what held it."""
