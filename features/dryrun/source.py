"""The source of the traces that dry runs make."""

COMMAND = "dry-run"
