"""Files for optimizer state that host memory does not hold."""
