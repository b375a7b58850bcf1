"""Records out-of-memory errors, and the holders of memory."""
