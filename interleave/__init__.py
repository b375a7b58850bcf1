"""Plans, simulates and runs optimizer updates from what a trace shows."""
