"""Rules on jobs that DeepSpeed runs, and on its own transfers, updates, and state on
storage."""
