"""Rules on jobs that DeepSpeed runs, and on what it does by itself.

They are about transfers, updates, and state on storage.
"""
