"""Reads the spools of a recording, complete or cut off anywhere, as traces."""
