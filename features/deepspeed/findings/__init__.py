"""Rules on jobs that DeepSpeed runs, and on what it does by itself: transfers, updates,
state on storage."""
